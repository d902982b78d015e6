"""The backward for the cases that some outputs get no cotangent, or that some gradients are not needed.

Eager leaves out the paths that start at outputs without a tangent (multiplying zeros by infinity on the way would make
NaNs). A backward graph is linear in its tangents, so a missing tangent is a zero that linear operators pass on: the
graph is cut down to the nodes that the present tangents reach.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from .._torch.fakes import new_fake
from .._torch.graphs import depending_on, is_random, make_graph_module, needed_by, piece, symbol_of, symbols_in
from .._torch.instead import replayed
from .._torch.ops import OpOverload
from .._torch.symbols import map_symbolic, write_expression
from ..errors import UnsupportedError
from ..graph.calls import call_of
from ..graph.meta import NodeMeta, TensorSpec, spec_of
from ..graph.signature import GradientPaths
from .opaque import opaque_values

aten = torch.ops.aten

# Operators that give zeros for zeros in any operand: sums, products, rearrangements. Operators that are derivatives by
# name do so too.
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
    aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.alias.default,
    aten.detach.default, aten.where.self, aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.convolution.default, aten.addmm.default, aten.baddbmm.default, aten.linalg_cross.default,
    aten._trilinear.default, aten.linalg_solve_triangular.default, aten.triangular_solve.default,
    aten.linalg_lu_solve.default, aten.cholesky_solve.default, aten.ormqr.default, aten._fft_c2c.default,
    aten._fft_c2r.default, aten._fft_r2c.default,
    aten.new_zeros.default, aten.zeros_like.default, aten.new_empty_strided.default, aten.diag_embed.default,
    aten.scatter.src, aten.scatter_add.default, aten.index_add.default, aten.index_put.default, aten.index_copy.default,
    aten.put.default, aten.take.default, aten.masked_scatter.default, aten.col2im.default, aten.im2col.default,
    aten.rot90.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default,
    aten._linalg_solve_ex.default, aten._conj_physical.default, aten.index_fill.int_Tensor, aten.xlogy.Tensor,
    aten.special_xlog1py.default, aten._unsafe_masked_index_put_accumulate.default, operator.getitem,
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
}  # fmt: skip
# Operators that do so if the number that they fill in is zero: its position.
_FILLS = {
    aten.masked_fill.Scalar: 2, aten.constant_pad_nd.default: 2, aten.index_fill.int_Scalar: 3, aten.scatter.value: 3,
    aten._unsafe_masked_index.default: 3,
}  # fmt: skip
# Operators that do so among those run on copies of the arguments that they write to.
_IN_PLACE = {aten.mul_.Scalar, aten.mul_.Tensor, aten.div_.Scalar, aten.div_.Tensor}


def without_tangents(
    backward: fx.GraphModule, num_saved: int, mask: tuple[bool, ...], reached_from: Sequence[GradientPaths]
) -> fx.GraphModule:
    """`backward` specialized to the tangents at True positions of `mask`: its only inputs.

    `reached_from` is the signature's: a gradient is None if no present tangent leads to it, or if it depends on none
    and PyTorch's own formulas leave it undefined.
    """
    tangents = [n for n in backward.graph.nodes if n.op == "placeholder"][num_saved:]
    missing = [t for t, present in zip(tangents, mask, strict=True) if not present]
    present = frozenset(i for i, is_given in enumerate(mask) if is_given)
    everything = GradientPaths(frozenset(range(len(mask))), frozenset(range(len(mask))))

    def leads(position: int, alive: bool, _: bool) -> bool:
        return (reached_from[position] if reached_from else everything).leads(present, alive=alive)

    return _cut_down(backward, tangents, missing, leads)


def without_gradients(
    rest: fx.GraphModule, gradients: Collection[str], absent: Collection[str], results: int
) -> fx.GraphModule:
    """The `rest` of a backward specialized to the `absent` gradients among its `gradients`, by name; the rest are its
    inputs. The first `results` results are gradients, None where they depend on absent gradients alone.
    """
    placeholders = [n for n in rest.graph.nodes if n.op == "placeholder"]
    taken = [n for n in placeholders if n.name in gradients]
    missing = [n for n in placeholders if n.name in absent]
    return _cut_down(rest, taken, missing, lambda position, _, is_zero: position >= results or not is_zero)


def _cut_down(
    module: fx.GraphModule,
    tangents: Sequence[fx.Node],
    missing: Sequence[fx.Node],
    leads: Callable[[int, bool, bool], bool],
) -> fx.GraphModule:
    """`leads(position, alive, zero)`: whether the position has a gradient: zero, or of a present tangent."""
    old = module.graph
    opaque = opaque_values().nodes(old)
    # The gradient of an embedding without indices is empty, and depends on no tangent.
    empty = opaque - depending_on(old, tangents)
    depends = depending_on(old, [*tangents, *empty])
    zeros = _zeros(old, depends, [*missing])
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    sizes = _Sizes(graph, copies)
    sums: list[fx.Node] = []

    def value(node: fx.Node) -> Any:
        if node in opaque and node not in copies:  # a sparse zero is computed as before
            copies[node] = graph.node_copy(node, value)
            copies[node].meta = node.meta
        elif node in zeros and node not in copies:
            copies[node] = _materialized(graph, node, sizes)
        return copies[node]

    for node in old.nodes:
        if node.op == "placeholder" and node in zeros:
            continue
        if node.op == "output":
            alive = depending_on(old, [*(t for t in tangents if t not in missing), *empty])
            gradients = [
                value(g) if g is not None and leads(i, g in alive, g in zeros) else None
                for i, g in enumerate(node.args[0])
            ]
            graph.output(gradients)
        elif node not in zeros:
            survivor = _other_summand(node, zeros, opaque)
            if survivor is not None:
                copies[node] = copies[survivor]
                continue
            call = call_of(node.target, node.args)
            absent = [] if call is None else [tensor in zeros for tensor in node.args[1]]
            other = call.without(absent) if call is not None and any(absent) else None
            if other is not None:
                there = [value(tensor) for tensor in node.args[1] if tensor not in zeros]
                args = (other.key, there, *map_arg(node.args[2:], value))
                copies[node] = graph.create_node("call_function", node.target, args, name=node.name)
            else:
                copies[node] = graph.node_copy(node, value)
            copies[node].meta = node.meta
            if opaque and node.target is aten.add.Tensor and node.args[0] not in opaque:
                sums.append(copies[node])
    _reorder(sums, opaque_values().nodes(graph) if sums else set())
    graph.eliminate_dead_code(is_impure_node=_stays)
    return make_graph_module(module, graph, "PartialBackward")


def backward_acts(joint: fx.Graph) -> bool:
    """Whether the backward in a joint graph calls Python, has other effects or draws random numbers. A part of the
    backward then does more than give gradients: eager runs only the nodes on the way of the part's gradients.
    """
    calls = (node for node in joint.nodes if node.op == "call_function")
    backward = (node for node in calls if node.meta.get("partitioner_tag") == "is_backward")
    return any(
        node.is_impure(impure_random=False) or (is_random(node) and not node.name.endswith("_backward"))
        for node in backward
    )


def _stays(node: fx.Node) -> bool:
    """Whether an unread node stays; asked for nodes from the end of the graph on."""
    random = replayed(node)
    return node.op in ("placeholder", "output") or (random is not None and bool(random.users))


def _zeros(graph: fx.Graph, depends: set[fx.Node], missing: list[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on a tangent and are zero."""
    zeros = set(missing)
    for node in graph.nodes:
        is_linear = node.op == "call_function" and node in depends and _is_linear(node)
        operands = [a for a in node.all_input_nodes if a in depends] if is_linear else []
        if operands and zeros.issuperset(operands):
            zeros.add(node)
    return zeros


def _is_linear(node: fx.Node) -> bool:
    op = node.target
    if op in _FILLS:
        return node.args[_FILLS[op] :] in ((), (0,))
    if op in _LINEAR or getattr(op, "op", None) in _IN_PLACE:
        return True
    name = op._schema.name if isinstance(op, OpOverload) else ""
    return name.startswith("aten::") and name.endswith(("_backward", "_backward_data"))


def _other_summand(node: fx.Node, zeros: set[fx.Node], opaque: set[fx.Node]) -> fx.Node | None:
    """For the sum of a zero and a value of equal layout: the value. For a dense zero and a sparse gradient: the
    gradient, left sparse as in eager.
    """
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or (a in zeros) == (b in zeros):
        return None
    other = b if a in zeros else a
    if not opaque.isdisjoint((a, b)):
        return other
    have, want = spec_of(other), spec_of(node)
    if isinstance(have, TensorSpec) and isinstance(want, TensorSpec) and have.same_layout(want):
        return other
    return None


def _reorder(sums: list[fx.Node], opaque: set[fx.Node]) -> None:
    """Swap the summands if the first has become opaque: autograd then adds it to the incoming gradient."""
    for node in sums:
        if node.args[0] in opaque:
            node.args = (*reversed(node.args),)


def _materialized(graph: fx.Graph, node: fx.Node, sizes: _Sizes) -> fx.Node:
    spec = spec_of(node)
    if isinstance(spec, TensorSpec):
        contiguous = spec.fresh(spec.shape)
        shape, stride = map_symbolic(list(spec.shape), sizes.node), map_symbolic(list(spec.stride), sizes.node)
        zeros = graph.call_function(aten.full.default, (shape, 0), {"dtype": spec.dtype, "device": spec.device})
        zeros.meta = _described(contiguous, node)
        if spec.stride == contiguous.stride:
            return zeros
        empty = graph.call_function(
            aten.empty_strided.default, (shape, stride), {"dtype": spec.dtype, "device": spec.device}
        )
        empty.meta = _described(spec, node)
        laid_out = graph.call_function(aten.copy.default, (empty, zeros))
        laid_out.meta = _described(spec, node)
        return laid_out
    raise NotImplementedError(f"zeros for {node.format_node()}")


def _described(spec: TensorSpec, like: fx.Node) -> NodeMeta:
    def fake() -> torch.Tensor:
        return new_fake(like.meta["val"].fake_mode, spec.shape, spec.stride, spec.dtype, spec.device)

    return NodeMeta({"spec": spec}, late={"val": fake})


class _Sizes:
    """Symbolic sizes in the backward, read off its inputs."""

    def __init__(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        self.graph = graph
        self.copies = copies
        self.node_by_symbol: dict[object, fx.Node] = {}

    def node(self, number: object) -> Any:
        for symbol in symbols_in(number):
            if symbol not in self.node_by_symbol:
                self.node_by_symbol[symbol] = self._find(symbol)
        return write_expression(self.graph, number, self.node_by_symbol)

    def _find(self, symbol: object) -> fx.Node:
        for node in self.copies.values():
            if node.op != "placeholder":
                continue
            spec = spec_of(node)
            if not isinstance(spec, TensorSpec):
                if symbol_of(node.meta.get("val")) == symbol:
                    number: fx.Node = node
                    return number
                continue
            for dim, size in enumerate(spec.shape):
                if symbol_of(size) == symbol:
                    size_node = self.graph.call_function(aten.sym_size.int, (node, dim))
                    size_node.meta = {"val": size}
                    return size_node
        raise UnsupportedError(
            f"the backward for only some of the outputs needs the size {symbol}, and none of its inputs has it. "
            "Compile with dynamic=False, or use all outputs in the loss."
        )


# -------------------------------------------------------------------- gradients that nobody asks for
# The backward for the case that only some of its gradients are needed, as for `autograd.grad(y, x)`. Eager computes
# no others.


def only_gradients(backward: fx.GraphModule, positions: Collection[int]) -> fx.GraphModule:
    """`backward` cut down to the gradients at `positions`; all other gradients become None."""
    output = next(iter(reversed(backward.graph.nodes)))
    kept = [gradient if i in positions else None for i, gradient in enumerate(output.args[0])]
    needed = needed_by(gradient for gradient in kept if gradient is not None)
    nodes = [node for node in backward.graph.nodes if node.op not in ("output", "get_attr")]
    for node in nodes:
        if replayed(node) in needed:
            needed.update((node, *node.all_input_nodes))
    inputs = [node for node in nodes if node.op == "placeholder"]
    computed = [node for node in nodes if node in needed and node.op != "placeholder"]
    return piece(backward, inputs, computed, kept, "PartialBackward")
