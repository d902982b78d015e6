"""Operators replaced by their decompositions in a graph that is captured already.

Capture decomposes what it is asked to as it goes. What functionalization makes of in-place operators comes later, so
a few are left; a graph that came from elsewhere may have any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch.fakes import FakeTensorMode

__all__ = ["decompose"]


def decompose(
    gm: fx.GraphModule,
    table: Mapping[Any, Callable[..., Any]],
    fake_mode: FakeTensorMode,
    leave: Collection[fx.Node] = (),
) -> int:
    """Replace, in place, every call of an operator in `table` by what it decomposes into; how many there were.

    Nodes in `leave` stay.

    A decomposition that gives `NotImplemented`, or refuses its arguments so, leaves the call as it is.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node in leave:
            continue
        if node.target in table and _expand(gm.graph, node, table, fake_mode):
            count += 1
    if count:
        gm.graph.lint()
    return count


def _expand(graph: fx.Graph, node: fx.Node, table: Mapping[Any, Callable[..., Any]], fake_mode: FakeTensorMode) -> bool:
    operands = node.all_input_nodes

    def call(*values: Any) -> Any:
        value_of = dict(zip(operands, values, strict=True)).__getitem__
        return node.target(*fx.map_arg(node.args, value_of), **fx.map_arg(node.kwargs, value_of))  # type: ignore[operator]

    values = [operand.meta["val"] for operand in operands]
    with fake_mode, torch.no_grad():
        traced = make_fx(call, decomposition_table=dict(table))(*values)
    if any(inner.target is node.target for inner in traced.graph.nodes):
        return False
    inputs = iter(operands)
    made: dict[fx.Node, Any] = {}
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                made[inner] = next(inputs)
            elif inner.op == "get_attr":
                return False
            elif inner.op == "output":
                _replace(node, fx.map_arg(inner.args[0], made.__getitem__))
            else:
                made[inner] = new = graph.node_copy(inner, made.__getitem__)
                new.meta |= {k: v for k, v in dict.items(node.meta) if k not in ("val", "spec", "tensor_meta")}
    graph.erase_node(node)
    return True


def _replace(node: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):  # getitem
        user.replace_all_uses_with(result[user.args[1]])
        user.graph.erase_node(user)
