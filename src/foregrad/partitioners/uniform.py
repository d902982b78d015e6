"""Uniform plans: the same choice of residuals in every block, and what each block then saves, costs and needs at once.

A plan keeps the waist of every L-th block and, inside, what a minimum cut keeps when a saved byte costs `price`
operations. Simulated once for the whole graph, a plan tells of each segment of L blocks: the bytes that it saves, the
cost of what its backward computes again, and the most bytes alive while it runs, forward or backward. A plan for the
whole is put together from such segments (see budget.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from .blocks import SHARED, Blocks
from .classify import Kind
from .cut import NEVER, cheapest_residuals, required_by_backward
from .index import JointIndex, value_of
from .liveness import Liveness, Storages
from .recompute import reading_written
from .repeats import find_repeats
from .split import backward_needs
from .tags import Wish, to_offload, wishes

__all__ = ["Measured", "Segment", "Space", "measure"]

# Operations that a saved byte is worth, from one that keeps all but the cheapest to one that keeps nothing.
_PRICES = tuple(4 << k for k in range(16))
_LONGEST = 8  # blocks in a segment


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Blocks `start` to `stop` under one plan. `needs`: the most bytes alive beyond what earlier blocks saved."""

    start: int
    stop: int
    saves: int
    costs: int
    needs: int
    plan: int
    like: int  # the start of the equal blocks of the plan that this was measured on


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A choice of residuals (numbers of nodes) with the memory that it takes and the cost of what is computed again."""

    residuals: tuple[int, ...]
    peak: int
    costs: int
    liveness: Liveness
    used: tuple[int, ...]  # what the backward takes
    again: tuple[int, ...]  # what the forward computed, and it computes once more
    away: frozenset[int] = frozenset()  # of what it takes, what waits in host memory


class Space:
    """The choices that a graph leaves: prices of saving, costs of computing again, its blocks and storages."""

    def __init__(self, index: JointIndex, storages: Storages, cost: Sequence[int], blocks: Blocks) -> None:
        self.index, self.storages, self.cost, self.blocks = index, storages, cost, blocks
        self.required = set(required_by_backward(index))
        self.away = frozenset(to_offload(index))
        wish = wishes(index)
        kinds = index.kinds
        held = {storages.root[i] for i in index.output_numbers}
        self.save: list[int] = []
        self.redo: list[int] = []
        for i, kind in enumerate(kinds):
            save, redo = storages.size[storages.root[i]], cost[i] if index.in_forward[i] else 0
            if kind is Kind.INPUT:
                save = storages.size[i] if i in index.written else 0
                redo = NEVER
            elif kind is Kind.CONSTANT:
                save = 0
            elif kind is Kind.NUMBER:
                save = 1
            elif kind is Kind.VIEW or index.needs_tangent[i] or isinstance(value_of(index.nodes[i]), (tuple, list)):
                save = NEVER
            elif storages.root[i] in held:
                save = 0
            if index.needs_tangent[i] or (kind in (Kind.RANDOM, Kind.EFFECT) and index.in_forward[i]):
                redo = NEVER
            if wish is not None and wish[i] == Wish.SAVE:
                redo = NEVER
            elif wish is not None and wish[i] == Wish.RECOMPUTE and save < NEVER:
                save = NEVER
            self.save.append(save)
            self.redo.append(redo)
        for i in reading_written(index):
            self.redo[i] = NEVER
        for i, kind in enumerate(kinds):
            if kind is Kind.ITEM and self.redo[index.operands[i][0]] >= NEVER:
                self.redo[i] = NEVER
        self.repeats = find_repeats(
            index, storages, blocks, lambda i: (self.save[i], self.redo[i], i in self.required, storages.size[i])
        )
        self._solved: dict[tuple[int, ...], list[int]] = {}
        self.measured: list[Measured] = []
        self.segments: list[Segment] = []
        self._kept: list[frozenset[int]] = []
        self._gradients_after = [0] * (blocks.count + 1)

    def everything(self) -> Measured:
        """Save whatever the backward reads."""
        # What can't be saved is computed again; nothing else is, but at no cost.
        redo = [NEVER if redo and save < NEVER else redo for save, redo in zip(self.save, self.redo, strict=True)]
        return measure(self, cheapest_residuals(self.index, self.save, redo, self.required))

    def explore(self) -> None:
        """Measure the uniform plans, and take them apart into segments."""
        self._add(self.everything(), 1)
        seen: set[tuple[int, ...]] = set()
        for length in range(1, min(_LONGEST, self.blocks.count) + 1):
            for price in _PRICES if length == 1 else _PRICES[-1:]:
                residuals = tuple(self._uniform(price, length))
                if residuals not in seen:
                    seen.add(residuals)
                    self._add(measure(self, residuals), length)

    def _uniform(self, price: int, length: int) -> list[int]:
        """What the same choice in each row of `length` blocks saves."""
        found = {r for i, r in enumerate(self.storages.root) if self.blocks.of[r] == SHARED and self._can_save(r)}
        for start, stop in _cells(self.blocks.count, length):
            found |= {r for r in self.blocks.waists[start] if self._can_save(r)}
            found.update(self._local(price, start, stop))
        return sorted(found)

    def _can_save(self, i: int) -> bool:
        return self.save[i] < NEVER and self.index.kinds[i] is not Kind.INPUT and not self.index.needs_tangent[i]

    def _local(self, price: int, start: int, stop: int) -> list[int]:
        """What blocks `start` to `stop` save, when a saved byte costs `price`. Found once for equal blocks."""
        members = [i for nodes in self.repeats.members[start:stop] for i in nodes]
        key = (price, *self.repeats.classes[start:stop])
        places = self._solved.get(key)
        if places is None:
            place = {i: k for k, i in enumerate(members)}
            operands = [[place[o] for o in self.index.operands[i] if o in place] for i in members]
            save = [s if s >= NEVER else s * price for s in (self.save[i] for i in members)]
            redo = [self.redo[i] for i in members]
            required = [k for k, i in enumerate(members) if i in self.required]
            places = self._solved[key] = cheapest_residuals(_Part(self.index, operands, members), save, redo, required)
        return [members[k] for k in places]

    def _add(self, plan: Measured, length: int) -> None:
        number = len(self.measured)
        self.measured.append(plan)
        self._kept.append(frozenset(plan.residuals))
        blocks, index, storages = self.blocks, self.index, self.storages
        saves, again = [0] * blocks.count, [0] * blocks.count
        kept = {storages.root[i] for i in index.output_numbers}
        for r in {storages.root[i] for i in plan.used} - kept:
            if blocks.of[r] != SHARED and index.kinds[r] is not Kind.INPUT:
                saves[blocks.of[r]] += storages.size[r]
        for i in plan.again:
            if blocks.of[i] != SHARED:
                again[blocks.of[i]] += self.cost[i]
        windows = _windows(self, plan.liveness.backward.order)
        if not number:
            self._note_gradients(plan.liveness.backward.order, windows)
        peaks = _peaks(self, plan.liveness, windows)
        gradients = self._gradients_after
        for start, stop in _cells(blocks.count, length):
            needs = max(peaks[start:stop]) - sum(saves[:start])
            found = Segment(start, stop, sum(saves[start:stop]), sum(again[start:stop]), needs, number, start)
            self.segments.append(found)
            if length > 1:  # the same blocks in another phase
                for k in self._shifted(start, stop):
                    moved = needs - gradients[stop] + gradients[k + stop - start]
                    self.segments.append(dataclasses.replace(found, start=k, stop=k + stop - start, needs=moved))

    def _note_gradients(self, order: list[int], windows: list[int]) -> None:
        """The bytes of gradients that the backward of the blocks from each on leaves."""
        root, size = self.storages.root, self.storages.size
        gradients = {root[i] for i in self.index.gradient_numbers}
        for i, b in zip(order, windows, strict=True):
            if i in gradients:
                self._gradients_after[b] += size[i]
        for b in range(self.blocks.count - 1, -1, -1):
            self._gradients_after[b] += self._gradients_after[b + 1]

    def _shifted(self, start: int, stop: int) -> list[int]:
        """Where rows of blocks equal to those from `start` to `stop` start, that no row of the plan is."""
        length, classes = stop - start, self.repeats.classes
        key = tuple(classes[start:stop])
        if start != 1:
            return []
        return [
            k
            for k in range(1, self.blocks.count - length + 1)
            if (k - 1) % length and tuple(classes[k : k + length]) == key
        ]

    def assemble(self, segments: Sequence[Segment]) -> Measured:
        """The plan made of these segments, measured."""
        members = self.repeats.members
        chosen: set[int] = set()
        for segment in segments:
            plan = self._kept[segment.plan]
            chosen.update(i for i in self.measured[segment.plan].residuals if self.blocks.made_in[i] == SHARED)
            chosen.update(r for r in self.blocks.waists[segment.start] if self._can_save(r))
            shift = segment.start - segment.like
            for b in range(segment.start, segment.stop):
                chosen.update(i for i, other in zip(members[b], members[b - shift], strict=True) if other in plan)
        return measure(self, sorted(chosen))


def measure(space: Space, residuals: Sequence[int], moved: Collection[int] = (), price: float = 0.0) -> Measured:
    """What a choice costs. `moved`: of the residuals, those sent to host memory and back, for `price` a byte."""
    index = space.index
    used, computed = backward_needs(index, [index.nodes[i] for i in residuals])
    again = tuple(i for i, bit in enumerate(computed) if bit and index.in_forward[i])
    away = space.away.union(moved).intersection(used)
    liveness = space.storages.of_split(used, computed, away)
    cost = sum(space.cost[i] for i in again) + round(price * sum(space.storages.size[i] for i in away - space.away))
    return Measured(tuple(residuals), liveness.peak, cost, liveness, tuple(used), again, away)


def _cells(count: int, length: int) -> Iterator[tuple[int, int]]:
    """The rows of `length` blocks; the first block starts from the arguments, and is a row of its own."""
    starts = [0, *range(1, count, length)]
    yield from zip(starts, [*starts[1:], count], strict=True)


def _windows(space: Space, order: Sequence[int]) -> list[int]:
    """For each operator of a backward, the block whose backward it belongs to."""
    index, blocks, root = space.index, space.blocks, space.storages.root
    windows: list[int] = []
    now = blocks.count - 1
    waiting = 0  # of what is computed again for the next operator of the backward
    for i in order:
        waiting += 1
        if not index.needs_tangent[i]:
            continue
        read = [blocks.of[root[operand]] for operand in index.operands[i] if not index.needs_tangent[operand]]
        now = min([now, *(b for b in read if b != SHARED)])
        windows += [now] * waiting
        waiting = 0
    return windows + [0] * waiting


def _peaks(space: Space, liveness: Liveness, windows: list[int]) -> list[int]:
    """For each block, the most bytes alive while it runs, in the forward or in the backward."""
    made_in = space.blocks.made_in
    peaks = [0] * space.blocks.count
    now = 0
    for i, live in zip(liveness.forward.order, liveness.forward.bytes, strict=True):
        now = max(now, made_in[i])
        peaks[now] = max(peaks[now], live)
    for b, live in zip(windows, liveness.backward.bytes, strict=True):
        peaks[b] = max(peaks[b], live)
    peaks[0] = max(peaks[0], liveness.backward.after)
    peaks[-1] = max(peaks[-1], liveness.forward.after)
    return peaks


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Some nodes of a graph by themselves: what else they read is there."""

    index: JointIndex
    operands: list[list[int]]
    members: list[int]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def kinds(self) -> list[Kind]:
        return [self.index.kinds[i] for i in self.members]

    def describe(self, i: int) -> str:
        return self.index.describe(self.members[i])
