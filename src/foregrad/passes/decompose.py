"""Operators replaced by their decompositions in a captured graph.

Capture decomposes operators as it records them. Functionalization adds operators later, so a few are left; a graph from
elsewhere may have any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch.fakes import FakeTensorMode
from .._torch.graphs import function_of, symbols_in
from ..graph.meta import layout_of, structure_of


def decompose(
    gm: fx.GraphModule,
    table: Mapping[Any, Callable[..., object]],
    fake_mode: FakeTensorMode,
    leave: Collection[fx.Node] = (),
) -> int:
    """Replace, in place, every call of an operator in `table` by its decomposition; returns their number.

    Nodes in `leave` stay. A decomposition that returns or raises `NotImplemented` leaves the call as it is. Equal
    calls, as in a model's layers, are traced once, unless their sizes are symbolic.
    """
    count, traced = 0, dict[Any, fx.GraphModule]()
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node in leave:
            continue
        if node.target in table and _expand(gm.graph, node, table, fake_mode, traced):
            count += 1
    if count:
        gm.graph.lint()
    return count


def _expand(
    graph: fx.Graph,
    node: fx.Node,
    table: Mapping[object, Callable[..., object]],
    fake_mode: FakeTensorMode,
    traces: dict[object, fx.GraphModule],
) -> bool:
    operands = node.all_input_nodes
    values = [operand.meta["val"] for operand in operands]
    key: fx.Node = node
    if all(isinstance(value, torch.Tensor) and not symbols_in(value) for value in values):
        place = {operand: (i, values[i].storage_offset(), layout_of(values[i])) for i, operand in enumerate(operands)}
        key = structure_of(node, place.__getitem__)
    if key not in traces:
        traces[key] = _traced(node, values, table, fake_mode)
    traced = traces[key]
    if any(inner.target is node.target for inner in traced.graph.nodes):
        return False
    inputs = iter(operands)
    copies: dict[fx.Node, Any] = {}
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(inputs)
            elif inner.op == "get_attr":
                return False
            elif inner.op == "output":
                _replace(node, fx.map_arg(inner.args[0], copies.__getitem__))
            else:
                copies[inner] = new = graph.node_copy(inner, copies.__getitem__)
                new.meta |= {k: v for k, v in dict.items(node.meta) if k not in ("val", "spec", "tensor_meta")}
    graph.erase_node(node)
    return True


def _traced(
    node: fx.Node, values: Sequence[object], table: Mapping[Any, Callable[..., object]], fake_mode: FakeTensorMode
) -> fx.GraphModule:
    operands = node.all_input_nodes

    def call(*values: Any) -> Any:
        value_of = dict(zip(operands, values, strict=True)).__getitem__
        return function_of(node)(*fx.map_arg(node.args, value_of), **fx.map_arg(node.kwargs, value_of))

    with fake_mode, torch.no_grad():
        return make_fx(call, decomposition_table=dict(table))(*values)


def _replace(node: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):  # getitem
        user.replace_all_uses_with(result[user.args[1]])
        user.graph.erase_node(user)
