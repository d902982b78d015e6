"""The order of a graph that writes to its inputs: an update comes as soon as all that it is computed from is there.

A training step in program order computes all gradients, then all new parameters. Where a gradient is read by nothing
else, it can go before the next is made. Only operators on elements move, and only to an earlier place: what is kept for
the backward, and what is drawn, stays in order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from .._torch.codegen import OpOverload
from .._torch.graphs import needed_by
from .._torch.ops import is_pointwise
from ..tracing.tape.opinfo import op_info
from .aliasing import Memory, memory_of

Node = fx.Node
Updates = Iterable[tuple[int, int]]  # an input, and the position among the results of its new value


def scheduled(nodes: Sequence[Node], updates: Updates) -> tuple[list[Node], set[Node]]:
    """(the nodes of a graph in the new order; those of them on elements that new values are computed by)."""
    results: Any = nodes[-1].args[0]
    position = {node: number for number, node in enumerate(nodes)}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    roots = [(placeholders[number], results[output]) for number, output in updates]
    tail = needed_by([root for _, root in roots if isinstance(root, Node)], _may_move)
    after: dict[Node, int] = {}  # the last node that is computed otherwise and that a node of the tail needs
    for node in nodes:
        if node in tail:
            known = (after.get(n, -1 if n.op == "placeholder" else position[n]) for n in node.all_input_nodes)
            after[node] = max(known, default=-1)
    places: dict[Node, tuple[int, int]] = {}
    aliases = by_memory(nodes)
    for rank, (placeholder, root) in enumerate(roots):
        if after.get(root, -1) >= 0:
            readers = {user for alias in aliases[memory_of(placeholder)] for user in alias.users} - tail
            last = max([after[root], *(position[reader] for reader in readers)])
            _place(root, (last, rank), places, position)
    for node in reversed(nodes):
        if node in places:
            for operand in node.all_input_nodes:
                if operand in tail:
                    _place(operand, places[node], places, position)
    return sorted(nodes, key=lambda node: (*places.get(node, (position[node], -1)), position[node])), tail


def _place(node: Node, place: tuple[int, int], places: dict[Node, tuple[int, int]], position: dict[Node, int]) -> None:
    if position[node] > place[0]:
        places[node] = min(place, places.get(node, place))


def _may_move(node: Node) -> bool:
    """Whether a node works on elements, or on numbers."""
    if node.op != "call_function":
        return False
    op = node.target
    return not isinstance(op, OpOverload) or is_pointwise(op) or op_info(op).is_view


def by_memory(nodes: Iterable[Node]) -> dict[Memory, list[Node]]:
    """The values in each memory."""
    found: dict[Memory, list[Node]] = {}
    for node in nodes:
        found.setdefault(memory_of(node), []).append(node)
    return found


def may_be_scheduled(nodes: Sequence[Node]) -> bool:
    """False for a graph that calls Python, which may read an input itself."""
    return isinstance(nodes[-1].args[0], (list, tuple)) and not any(map(_is_opaque, nodes))


def _is_opaque(node: Node) -> bool:
    """Whether a node runs code that may read an input itself, or gives views that are not in its schema."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target.namespace == "foregrad"
    return getattr(target, "__module__", "") not in (operator.__name__, "_operator", "math")
