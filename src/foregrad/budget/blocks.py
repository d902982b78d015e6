"""The forward as a row of blocks, cut where few bytes are alive: between two layers, for instance.

A *waist* is a place in the forward's order where few bytes pass from earlier to later operators. Blocks are the
stretches between waists. A block can be recomputed from the values that pass its waist. Values that pass most waists
(masks, position embeddings) belong to no block: they are shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..partitioners.classify import Kind
from ..partitioners.cut import required_by_backward
from ..partitioners.index import JointIndex
from ..partitioners.liveness import Storages

SHARED = -1
_MOST_BLOCKS = 128
_NEAR = 48  # a waist is compared with the places this many operators before and after it
_SLACK = 1.3  # blocks are cut at a place if at most this many times the least bytes pass there
_NOWHERE = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER)


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """`count` blocks. `made_in[i]`: the block that computes node i, `SHARED` for none. `waists[b]`: the storages that
    pass into block b.

    `of[i]`: the block that node i's storage counts for. A storage that passes a waist counts for the block behind it:
    the block starts from the storage.
    """

    count: int
    made_in: list[int]
    of: list[int]
    waists: list[frozenset[int]]


def find_blocks(index: JointIndex, storages: Storages, cost: Sequence[int]) -> Blocks:
    """The blocks of the forward: a single block if it has no waist."""
    order = [i for i, bit in enumerate(index.in_forward) if bit and index.kinds[i] not in _NOWHERE]
    passing = _passing(index, storages, order)
    shared = _shared(passing, len(order))
    sizes = [sum(storages.size[r] for r in live if r not in shared) for live in passing]
    places = _waists(sizes, passing, shared)
    if len(places) > _MOST_BLOCKS:
        places = _thinned(index, storages, places, [passing[k] - shared for k in places], cost)
    waists = [frozenset(), *(frozenset(passing[k] - shared) for k in places)]
    of = [SHARED] * len(index)
    block, ends = 0, [*places, len(order)]
    for k, i in enumerate(order):
        if k > ends[block]:
            block += 1
        of[i] = block
    for i in range(len(index)):
        if of[i] == SHARED and not index.needs_tangent[i] and index.kinds[i] not in _NOWHERE:
            of[i] = max((of[operand] for operand in index.operands[i]), default=SHARED)
    made_in = [SHARED if r in shared else b for b, r in zip(of, storages.root, strict=True)]
    for b, waist in enumerate(waists):
        for r in waist:
            of[r] = b
    for i, r in enumerate(storages.root):
        if r in shared:
            of[i] = SHARED
        elif r != i and of[r] > of[i]:
            of[i] = of[r]
    return Blocks(len(waists), made_in, of, waists)


def _passing(index: JointIndex, storages: Storages, order: list[int]) -> list[set[int]]:
    """For each place after an operator, the storages made by then that a later operator reads."""
    root, size = storages.root, storages.size
    last: dict[int, int] = {}
    for k, i in enumerate(order):
        for operand in index.operands[i]:
            last[root[operand]] = k
    passing: list[set[int]] = []
    live: set[int] = set()
    ending: dict[int, list[int]] = {}
    for k, i in enumerate(order):
        r = root[i]
        if size[r] and last.get(r, -1) > k and r not in live:
            live.add(r)
            ending.setdefault(last[r], []).append(r)
        for holder, _ in storages.results.get(i, ()):
            if holder is not None and last.get(holder, -1) > k and holder not in live:
                live.add(holder)
                ending.setdefault(last[holder], []).append(holder)
        live.difference_update(ending.pop(k, ()))
        passing.append(set(live))
    return passing


def _shared(passing: list[set[int]], count: int) -> set[int]:
    """Storages that are alive for most of the forward."""
    times: dict[int, int] = {}
    for live in passing:
        for r in live:
            times[r] = times.get(r, 0) + 1
    return {r for r, times_alive in times.items() if 2 * times_alive > count}


def _waists(sizes: list[int], passing: list[set[int]], shared: set[int]) -> list[int]:
    """The places of the waists."""
    places: list[int] = []
    before: set[int] = set()
    for k, size in enumerate(sizes[:-1]):
        near = sizes[max(0, k - _NEAR) : k + _NEAR + 1]
        if size == 0 or size > _SLACK * min(filter(None, near), default=0):
            continue
        live = passing[k] - shared
        if places and live == before:
            places[-1] = k  # equal values pass: as late as possible
        else:
            places.append(k)
        before = live
    return places


def _thinned(
    index: JointIndex, storages: Storages, places: list[int], waists: list[set[int]], cost: Sequence[int]
) -> list[int]:
    """At most `_MOST_BLOCKS` of the places, for instance every second, preferring values that are dear to recompute.

    The values at a waist are saved, so operators that serve only them do not run again: the last product of a layer,
    if the waist is the layer's result.
    """
    step = -(-len(places) // _MOST_BLOCKS)
    there = set(required_by_backward(index)).union(*waists)
    spared = [_spared(index, storages, waist, there, cost) for waist in waists]
    phase = max(range(step), key=lambda k: (sum(spared[k::step]), k))
    return places[phase::step]


def _spared(index: JointIndex, storages: Storages, waist: set[int], there: set[int], cost: Sequence[int]) -> int:
    """The cost of the operators that only the values of a waist need; the values `there` exist in any case."""
    total, seen = 0, set(waist)
    waiting = list(waist)
    while waiting:
        i = waiting.pop()
        total += cost[i]
        for operand in index.operands[i]:
            if operand not in seen and index.kinds[operand] not in _NOWHERE:
                seen.add(operand)
                if operand not in there and storages.root[operand] not in there:
                    waiting.append(operand)
    return total
