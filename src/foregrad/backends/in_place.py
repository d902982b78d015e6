"""Inputs that a forward graph writes by itself, if eager writes a part of them in place.

A capture turns `x[:10] += 1` into a new `x`: a copy of the whole with ten new elements, which the runtime copies back.
If nothing reads the old elements later and no result shares the memory of the new ones, the eager backend writes the
ten elements into the input.

Known weakness: a part of a part (`x[0][:10] += 1`) is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._torch.codegen import OpOverload

__all__ = ["written_in_place"]

Node = torch.fx.Node
Written = Callable[..., torch.Tensor]

aten = torch.ops.aten
_VIEWS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


def written_in_place(
    nodes: list[Node], updates: Iterable[tuple[int, int]]
) -> tuple[dict[Node, Written], tuple[tuple[int, int], ...]]:
    """(the nodes of a graph that may write into their operand, each with the function that does so; the `updates`,
    pairs of an input and the output with its new elements, that these writes carry out).
    """
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results = nodes[-1].args[0]
    if not isinstance(results, (list, tuple)) or any(_is_foreign(node) for node in nodes):
        return {}, ()
    position = {node: number for number, node in enumerate(nodes)}
    writers: dict[Node, Written] = {}
    done = []
    for number, output in updates:
        chain = _scatters(results[output], placeholders[number])
        written = _all_written(chain, position, list(results)) if chain else None
        if written is not None:
            writers |= written
            done.append((number, output))
    return writers, tuple(done)


def _is_foreign(node: Node) -> bool:
    """Whether a node runs code that may read the input itself, or gives views that are not in its schema."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target = node.target
    if isinstance(target, OpOverload):
        return target.namespace == "foregrad"
    return getattr(target, "__module__", "") != "_operator"


def _scatters(result: Any, placeholder: Node) -> list[Node]:
    """The nodes that make `result` from a placeholder by writing parts of it, in order; empty if other nodes do."""
    chain: list[Node] = []
    while isinstance(result, Node) and result.target in _VIEWS:
        chain.insert(0, result)
        result = result.args[0]
    return chain if result is placeholder else []


def _all_written(chain: list[Node], position: dict[Node, int], results: list[Any]) -> dict[Node, Written] | None:
    """The in-place function for each node of the chain; None if one has to be a copy."""
    written = {}
    for scatter in chain:
        before = list(_aliases(scatter.args[0]))
        if any(node in results for node in before):
            return None
        if any(position[user] > position[scatter] for node in before for user in node.users):
            return None
        written[scatter] = _writing(_VIEWS[scatter.target], from_itself=scatter.args[1] in before)
    after = list(_aliases(chain[-1]))
    if sum(results.count(node) for node in after) != 1:
        return None
    return written


def _aliases(node: Any) -> Iterator[Node]:
    """A node and all views of it."""
    stack = [node]
    while stack:
        alias = stack.pop()
        yield alias
        stack += [user for user in alias.users if alias in user.args[:1] and _is_view(user)]


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and any(r.alias_info is not None for r in node.target._schema.returns)


def _writing(view: Any, *, from_itself: bool) -> Written:
    def write_in_place(whole: torch.Tensor, part: torch.Tensor, *where: Any, **more: Any) -> torch.Tensor:
        view(whole.detach(), *where, **more).copy_(part.clone() if from_itself else part)
        return whole

    return write_in_place
