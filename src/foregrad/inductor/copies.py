"""Copies in Inductor's graphs: of results that its passes put in one memory, and of updates, early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .._torch.fakes import FakeTensor
from ..graph.meta import TensorSpec, spec_of
from ..passes.aliasing import Memory, memory_of, results_of
from ..passes.mutations import by_memory, copied_inside, may_be_scheduled, scheduled

aten = torch.ops.aten


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


def copied_early(graph: fx.Graph, updates: Sequence[tuple[int, int]]) -> None:
    """As `copied_inside`, but each update and its `copy_` come as soon as they can. A compiler that orders kernels by
    its own estimate of memory begins with the order of the graph.
    """
    if not may_be_scheduled([*graph.nodes]):
        copied_inside(graph, updates)
        return
    *ordered, output = scheduled([*graph.nodes], updates)[0]
    for node in ordered:
        output.prepend(node)
    copies, aliases = copied_inside(graph, updates), by_memory(ordered)
    late, position = {output, *copies}, {node: number for number, node in enumerate(ordered)}
    for copy in copies:
        old, new = copy.all_input_nodes
        readers = {user for alias in aliases[memory_of(old)] for user in alias.users} - {copy}
        if late.isdisjoint(readers):
            max(new, *readers, key=position.__getitem__).append(copy)
