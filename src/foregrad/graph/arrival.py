"""In which order a compiled function's gradients reach the leaves that it was given: eager's.

Who watches gradients arrive sees the order: hooks, an optimizer in the backward, `DistributedDataParallel`, which lays
out its buckets by it. One node gives all of them at once. The engine then has one task for each leaf in its queue, a
binary heap in which they are equal, as leaves come before all else: from it they come in an order of its own, which
depends on that in which they went in alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

__all__ = ["queued_to_arrive"]


def queued_to_arrive(taken: Sequence[int], arrival: Sequence[int], leaves: Collection[int]) -> list[int]:
    """The inputs `taken`, in the order in which the gradients of `leaves` are to be queued to arrive like `arrival`.

    Others follow: they wait until no leaf is left.
    """
    among, noted = set(taken), set(arrival)
    wanted = [i for i in arrival if i in leaves and i in among]
    wanted += [i for i in taken if i in leaves and i not in noted]
    others = [i for i in taken if i not in leaves]
    queued = [0] * len(wanted)
    for place, index in zip(_taken_out(len(wanted), len(others)), wanted, strict=True):
        queued[place] = index
    return [*queued, *others]


@functools.cache
def _taken_out(count: int, others: int) -> tuple[int, ...]:
    """The numbers 0 to `count` - 1 in the order in which a heap gives equal items back that went in like that, followed
    by `others` that are smaller: `std::priority_queue`, as libstdc++ has it.
    """
    heap = list(range(count + others))
    found: list[int] = []
    while len(found) < count:
        found.append(heap[0])
        item = heap.pop()
        if heap:
            _sink(heap, item, count)
    return tuple(found)


def _sink(heap: list[int], item: int, count: int) -> None:
    """Put an item where the greatest one was: its place goes down to a leaf, the item then up again."""
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
