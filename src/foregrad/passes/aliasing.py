"""Results of a graph that have memory of their own, by their operators; copies of results that must have it.

A compiler's passes simplify `x * 1` to `x`. As a value that is right; as a result it is wrong: the caller may write to
the result, and would write to `x`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from .._torch.fakes import FakeTensor
from .._torch.graphs import body_of, ends_of
from .._torch.ops import OpOverload
from ..graph.meta import TensorSpec, spec_of
from ..tracing.tape.opinfo import op_info

aten = torch.ops.aten

Memory = tuple[fx.Node, int | None]
"""A node that made memory, and which of its results lives there; None where it has only one."""


def results_of(gm: fx.GraphModule) -> list[Any]:
    """The entries of a graph's output node: nodes, None, numbers."""
    results = ends_of(gm)[1]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def tensors_in(gm: fx.GraphModule) -> list[torch.Tensor]:
    """The constants of a graph."""
    paths = {str(node.target) for node in body_of(gm) if node.op == "get_attr"}
    attributes = [operator.attrgetter(path)(gm) for path in sorted(paths)]
    return [value for value in attributes if isinstance(value, torch.Tensor)]


def memory_of(node: fx.Node, inputs: Collection[fx.Node] = ()) -> Memory:
    """The memory that the value of `node` is in, or may be in: for a view the memory of its base. `inputs`: nodes that
    stand for a graph's inputs.
    """
    while True:
        source, index = node, None
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node not in inputs:
            source, index = node.args[0], node.args[1]  # one tensor of several
        if source in inputs or not isinstance(source.target, OpOverload) or not op_info(source.target).is_view:
            return source, index  # type: ignore[return-value]
        if not source.args or not isinstance(source.args[0], fx.Node):
            return source, index  # type: ignore[return-value]
        node = source.args[0]


def makes_memory(memory: Memory) -> bool:
    """Whether it is certain that an operator made this memory in the graph."""
    maker = memory[0].target
    return isinstance(maker, OpOverload) and memory[0].op == "call_function" and not op_info(maker).writes


def written_inputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs that the graph itself writes to."""
    roots: set[fx.Node] = set()
    inputs = dict.fromkeys(ends_of(gm)[0])
    for node in body_of(gm):
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            written = [node.args[i] for i in op_info(node.target).writes if i < len(node.args)]
            roots.update(memory_of(value, inputs)[0] for value in written if isinstance(value, fx.Node))
    return tuple(i for i, node in enumerate(inputs) if node in roots)


def copy_shared_results(gm: fx.GraphModule, before: fx.GraphModule, mode: object) -> bool:
    """Copy each result of `gm` that shares memory with an input or a result, and does not in `before`.

    `gm` was made from `before` by passes that keep the order of inputs and results. The copies have the strides of the
    results in `before`. Returns whether there is any.
    """
    output = next(iter(reversed(gm.graph.nodes)))
    results = results_of(gm)
    inputs = zip(*(graph.find_nodes(op="placeholder") for graph in (gm.graph, before.graph)), strict=True)
    owners: dict[Memory, Memory] = {(new, None): (old, None) for new, old in inputs}
    copied = False
    for i, (new, old) in enumerate(zip(results, results_of(before), strict=True)):
        if not isinstance(new, fx.Node) or not isinstance(old, fx.Node) or not isinstance(spec_of(old), TensorSpec):
            continue
        memory, promised = memory_of(new), memory_of(old)
        if memory[0].op == "get_attr" and promised[0].op == "get_attr":
            continue
        if memory[0].op != "get_attr" and owners.setdefault(memory, promised) == promised:
            continue
        with gm.graph.inserting_before(output):
            results[i] = _copy(gm.graph, new, spec_of(old), mode)
        owners[(results[i], None)] = promised
        copied = True
    if copied:
        output.args = (results,)
    return copied


def _copy(graph: fx.Graph, node: fx.Node, spec: TensorSpec, mode: object) -> fx.Node:
    """A copy of the value of `node`, laid out as `spec` says."""
    value = node.meta["val"]
    if not spec.is_static or tuple(value.stride()) == spec.stride or not spec.is_dense:
        return _call(graph, mode, aten.clone.default, node)
    order = sorted(range(len(spec.shape)), key=lambda dim: (spec.stride[dim], spec.shape[dim] != 1), reverse=True)
    turned = _call(graph, mode, aten.permute.default, node, order)
    laid_out = _call(graph, mode, aten.clone.default, turned, memory_format=torch.contiguous_format)
    return _call(graph, mode, aten.permute.default, laid_out, [order.index(dim) for dim in range(len(order))])


def _call(graph: fx.Graph, mode: Any, op: Any, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    value = node.meta["val"]
    if not isinstance(value, FakeTensor):
        value = mode.from_tensor(value)  # a constant's
    call = graph.call_function(op, (node, *args), kwargs)
    with torch.no_grad(), mode:
        call.meta["val"] = op(value, *args, **kwargs)
    return call
