"""The order in which a compiled function's gradients arrive at leaves: eager's order.

Hooks see this order, as does an optimizer in the backward, or `DistributedDataParallel`, which lays out its buckets by
it. One node gives all gradients at once. The engine then has one task for each leaf in its queue, a binary heap in
which leaves are equal and come before all other nodes. The heap's order depends only on that in which they went in.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

__all__ = ["queued_to_arrive"]


def queued_to_arrive(taken: Sequence[int], arrival: Sequence[int], leaves: Collection[int]) -> list[int]:
    """The inputs `taken`, in the order in which gradients of `leaves` must be queued to arrive in the order `arrival`.

    Other inputs follow: they wait until no leaf is left.
    """
    among, noted = set(taken), set(arrival)
    in_order = [i for i in arrival if i in leaves and i in among]
    in_order += [i for i in taken if i in leaves and i not in noted]
    others = [i for i in taken if i not in leaves]
    queued = [0] * len(in_order)
    for place, index in zip(_taken_out(len(in_order), len(others)), in_order, strict=True):
        queued[place] = index
    return [*queued, *others]


@functools.cache
def _taken_out(count: int, others: int) -> tuple[int, ...]:
    """The numbers 0 to `count` - 1 in the order in which a heap returns equal items that went in by number, followed by
    `others` smaller items: `std::priority_queue` of libstdc++.
    """
    heap = list(range(count + others))
    order: list[int] = []
    while len(order) < count:
        order.append(heap[0])
        item = heap.pop()
        if heap:
            _sink(heap, item, count)
    return tuple(order)


def _sink(heap: list[int], item: int, count: int) -> None:
    """Put an item in place of the greatest: the gap sinks to a leaf, then the item rises."""
    at, child = 0, 2
    while child < len(heap):
        if heap[child] >= count > heap[child - 1]:
            child -= 1
        heap[at], at = heap[child], child
        child = 2 * at + 2
    if child == len(heap):
        heap[at], at = heap[child - 1], child - 1
    while at and heap[(at - 1) // 2] >= count > item:
        heap[at], at = heap[(at - 1) // 2], (at - 1) // 2
    heap[at] = item
