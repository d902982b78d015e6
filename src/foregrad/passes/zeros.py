"""The backward for the case that some outputs have no gradient coming in.

Eager leaves out the paths that start at such outputs (multiplying zeros by infinity on the way would make NaNs).
A backward graph is linear in its tangents, so a missing tangent is a zero that linear operators pass on: the
graph is cut down to what the tangents that did come in reach.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import symbol_of, symbols_in
from .._torch.modules import make_graph_module
from .._torch.symbols import map_symbolic, write_expression
from ..errors import UnsupportedError
from ..graph.meta import TensorSpec, contiguous_strides, spec_of
from ..graph.signature import Reach

__all__ = ["without_tangents"]

aten = torch.ops.aten

# Operators that give zeros for zeros, wherever the zeros go in: sums, products, rearrangements.
_LINEAR = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
    aten.neg.default,
    aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.sum.default, aten.sum.dim_IntList,
    aten.mean.default, aten.mean.dim, aten.cumsum.default, aten.clone.default, aten._to_copy.default, aten.copy.default,
    aten.cat.default, aten.stack.default, aten.conj.default, aten._conj.default, aten._neg_view.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.expand.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.select.int, aten.slice.Tensor, aten.diagonal.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unbind.int, aten.as_strided.default, aten.select_backward.default, aten.slice_backward.default,
    aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default,
    aten.as_strided_scatter.default, aten.diagonal_backward.default, aten.unfold.default, aten.unfold_backward.default,
    aten.flip.default, aten.roll.default, aten.repeat.default, aten.tril.default, aten.triu.default,
    aten.constant_pad_nd.default, aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.alias.default,
    aten.detach.default, aten.masked_fill.Scalar, aten.where.self, aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.embedding_dense_backward.default, aten.threshold_backward.default, aten.tanh_backward.default,
    aten.sigmoid_backward.default, aten.gelu_backward.default, aten.silu_backward.default, aten.elu_backward.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.native_dropout_backward.default,
    aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default,
    aten.native_batch_norm_backward.default,
    aten.convolution_backward.default, aten.leaky_relu_backward.default, aten.hardtanh_backward.default,
    aten.softplus_backward.default, aten.avg_pool2d_backward.default, aten.max_pool2d_with_indices_backward.default,
    aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default, operator.getitem,
}  # fmt: skip


def without_tangents(
    backward: fx.GraphModule, num_saved: int, mask: tuple[bool, ...], reached_from: Sequence[Reach]
) -> fx.GraphModule:
    """`backward` specialized to the tangents at True positions of `mask` coming in; it takes only those.

    `reached_from` is the signature's: gradients that no such tangent leads to are None, and so are those that depend on
    none of them, where PyTorch's own formulas say so.
    """
    old = backward.graph
    placeholders = [n for n in old.nodes if n.op == "placeholder"]
    tangents = placeholders[num_saved:]
    given = [t for t, present in zip(tangents, mask, strict=True) if present]
    depends = _depending(old, tangents)
    zeros = _zeros(old, depends, [t for t in tangents if t not in given])
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    sizes = _Sizes(graph, made)

    def value(node: fx.Node) -> Any:
        if node in zeros and node not in made:
            made[node] = _materialized(graph, node, sizes)
        return made[node]

    for node in old.nodes:
        if node.op == "placeholder" and node in zeros:
            continue
        if node.op == "output":
            present = frozenset(i for i, is_given in enumerate(mask) if is_given)
            alive = _depending(old, given)
            gradients = []
            everything = Reach(frozenset(range(len(mask))), frozenset(range(len(mask))))
            for gradient, reach in zip(node.args[0], reached_from or [everything] * len(node.args[0]), strict=True):
                leads = gradient is not None and reach.leads(present, alive=gradient in alive)
                gradients.append(value(gradient) if leads else None)
            graph.output(gradients)
        elif node not in zeros:
            survivor = _other_summand(node, depends, zeros)
            if survivor is not None:
                made[node] = made[survivor]
                continue
            made[node] = graph.node_copy(node, value)
            made[node].meta = node.meta
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return make_graph_module(backward, graph, "PartialBackward")


def _zeros(graph: fx.Graph, depends: set[fx.Node], missing: list[fx.Node]) -> set[fx.Node]:
    """The nodes known to be zero, of those that depend on a tangent."""
    zeros = set(missing)
    for node in graph.nodes:
        is_linear = node.op == "call_function" and node in depends and node.target in _LINEAR
        if is_linear and all(a in zeros for a in node.all_input_nodes if a in depends):
            zeros.add(node)
    return zeros


def _depending(graph: fx.Graph, tangents: list[fx.Node]) -> set[fx.Node]:
    """The nodes that some of `tangents` go into, these too."""
    alive = set(tangents)
    for node in graph.nodes:
        if node.op == "call_function" and not alive.isdisjoint(node.all_input_nodes):
            alive.add(node)
    return alive


def _other_summand(node: fx.Node, depends: set[fx.Node], zeros: set[fx.Node]) -> fx.Node | None:
    """For the sum of a zero and something of the same layout: that something."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or (a in zeros) == (b in zeros):
        return None
    other = b if a in zeros else a
    have, want = spec_of(other), spec_of(node)
    if isinstance(have, TensorSpec) and isinstance(want, TensorSpec) and have.same_layout(want):
        return other
    return None


def _materialized(graph: fx.Graph, node: fx.Node, sizes: _Sizes) -> Any:
    spec = spec_of(node)
    if isinstance(spec, TensorSpec):
        contiguous = contiguous_strides(spec.shape)
        shape, stride = map_symbolic(list(spec.shape), sizes.node), map_symbolic(list(spec.stride), sizes.node)
        zeros = graph.call_function(aten.full.default, (shape, 0), {"dtype": spec.dtype, "device": spec.device})
        zeros.meta = {"spec": TensorSpec(spec.shape, contiguous, spec.dtype, spec.device)}
        if spec.stride == contiguous:
            return zeros
        empty = graph.call_function(
            aten.empty_strided.default, (shape, stride), {"dtype": spec.dtype, "device": spec.device}
        )
        empty.meta = {"spec": spec}
        laid_out = graph.call_function(aten.copy.default, (empty, zeros))
        laid_out.meta = {"spec": spec}
        return laid_out
    raise NotImplementedError(f"zeros for {node.format_node()}")


class _Sizes:
    """Symbolic sizes in the backward, read off what it is given."""

    def __init__(self, graph: fx.Graph, made: dict[fx.Node, Any]) -> None:
        self.graph = graph
        self.made = made
        self.known: dict[Any, fx.Node] = {}

    def node(self, number: Any) -> Any:
        for symbol in symbols_in(number):
            if symbol not in self.known:
                self.known[symbol] = self._find(symbol)
        return write_expression(self.graph, number, self.known)

    def _find(self, symbol: Any) -> fx.Node:
        for node in self.made.values():
            if node.op != "placeholder":
                continue
            spec = spec_of(node)
            if not isinstance(spec, TensorSpec):
                if symbol_of(node.meta.get("val")) == symbol:
                    found: fx.Node = node
                    return found
                continue
            for dim, size in enumerate(spec.shape):
                if symbol_of(size) == symbol:
                    size_node = self.graph.call_function(aten.sym_size.int, (node, dim))
                    size_node.meta = {"val": size}
                    return size_node
        raise UnsupportedError(
            f"the backward for only some of the outputs needs the size {symbol}, which nothing it was given has. "
            "Compile with dynamic=False, or use all outputs in the loss."
        )
