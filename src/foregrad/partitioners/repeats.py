"""Equal blocks: the same operators on the same shapes, so that a measurement of one holds for all.

Structure is the key: operators, arguments, shapes, strides, dtypes, which value reads which, the user's tags.
Two blocks of one class correspond node by node, in their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from ..passes.repeats import layout_of, structure_of
from .blocks import SHARED, Blocks
from .classify import Kind
from .index import JointIndex, value_of
from .liveness import Storages

__all__ = ["Repeats", "find_repeats"]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeats:
    """`members[b]`: the nodes of block b that need no tangents, in order. `classes[b]`: equal for equal blocks."""

    members: list[list[int]]
    classes: list[int]


def find_repeats(
    index: JointIndex, storages: Storages, blocks: Blocks, extra: Callable[[int], Any] = lambda i: None
) -> Repeats:
    """The classes of the blocks; `extra` gives a further key that must be equal for two nodes."""
    members: list[list[int]] = [[] for _ in range(blocks.count)]
    for i in range(len(index)):
        # By where it is computed: a value that passes a waist is computed before it.
        if not index.needs_tangent[i] and index.kinds[i] not in (Kind.INPUT, Kind.CONSTANT):
            at = blocks.made_in[i]
            if at != SHARED:
                members[at].append(i)
    numbers: dict[Any, int] = {}
    classes = []
    for nodes in members:
        place = {i: k for k, i in enumerate(nodes)}
        key = tuple([_key(index, storages, i, place, extra) for i in nodes])
        classes.append(numbers.setdefault(key, len(numbers)))
    return Repeats(members, classes)


def _key(
    index: JointIndex, storages: Storages, i: int, place: dict[int, int], extra: Callable[[int], Any]
) -> tuple[Any, ...]:
    node = index.nodes[i]

    def name(operand: fx.Node) -> Any:
        number = index.number[operand]
        at = place.get(number)
        if at is not None:
            return ("here", at)
        # From outside: what it is, not which.
        return ("outside", index.kinds[number], layout_of(value_of(operand)), place.get(storages.root[number]))

    return structure_of(node, name), extra(i)
