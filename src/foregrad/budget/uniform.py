"""Uniform plans: one choice of residuals for every block, with the bytes each block saves and needs, and its cost.

A plan saves the waist of every L-th block and, inside, the residuals of a minimum cut with `price` operations for a
saved byte. One simulation of the whole graph gives for each segment of L blocks: the bytes that it saves, the cost of
recomputation in its backward, and the most bytes alive while it runs, forward or backward. A plan for the whole graph
is put together from segments (see budget.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import fx

from ..graph.meta import layout_of, structure_of, value_of
from ..partitioners.classify import Kind
from ..partitioners.costs import flops
from ..partitioners.cut import NEVER, cheapest_residuals, required_by_backward
from ..partitioners.index import JointIndex
from ..partitioners.liveness import Liveness, Storages
from ..partitioners.mincut import reading_written
from ..partitioners.policies import Wish, to_offload, wishes
from ..partitioners.split import Excerpt, backward_needs
from .blocks import SHARED, Blocks

# Operations that a saved byte is worth, from a price that saves all but the cheapest to one that saves nothing.
_PRICES = tuple(4 << k for k in range(16))
# Prices (negated) for plans without heavy recomputation.
_LIGHT = (-_PRICES[-1], -_PRICES[6])
_LONGEST = 8  # blocks in a segment
_AFTER = 3  # gradients of so many following blocks may be alive while a block's backward runs


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Blocks `start` to `stop` under one plan. `needs`: the most bytes alive beyond earlier blocks' saved bytes."""

    start: int
    stop: int
    saves: int
    costs: int
    needs: int
    plan: int
    like: int  # the start of the equal blocks of the plan that this was measured on


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A choice of residuals (numbers of nodes) with its memory and its cost of recomputation."""

    residuals: tuple[int, ...]
    peak: int
    costs: int
    liveness: Liveness
    used: tuple[int, ...]  # the inputs and residuals that the backward takes
    again: tuple[int, ...]  # the nodes of the forward that the backward runs once more
    away: frozenset[int] = frozenset()  # the residuals that wait in host memory


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
            if index.needs_tangent[i] or (index.runs_once_in_forward(i) and i not in index.replays):
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
        self._of_all = {r for r in set(storages.root) if blocks.of[r] == SHARED and self._can_save(r)}
        self.measured: list[Measured] = []  # the plans of the segments, some measured on a part of the graph
        self.plans: list[Measured] = []  # the plans measured on the whole graph
        self.segments: list[Segment] = []
        self._kept: list[frozenset[int]] = []
        self.place = _windows(self)  # the block that a node's forward or backward belongs to
        # Bytes of gradients that each block's backward leaves, and their sum from each block on.
        self.gradients = [0] * blocks.count
        for r in {storages.root[i] for i in index.kept_gradients}:
            if index.needs_tangent[r]:
                self.gradients[self.place[r]] += storages.size[r]
        self.left = _from_each(self.gradients)

    def everything(self) -> Measured:
        """The plan that saves every value that the backward reads."""
        # Values that can't be saved, and values that cost nothing, are recomputed.
        redo = [NEVER if redo and save < NEVER else redo for save, redo in zip(self.save, self.redo, strict=True)]
        return measure(self, cheapest_residuals(self.index, self.save, redo, self.required))

    def explore(self) -> None:
        """Find the segments: of saving everything, and of the uniform plans."""
        everywhere = range(self.blocks.count)
        self.plans.append(self.everything())
        self._add(self.plans[0], 1, everywhere)
        seen: set[tuple[int, ...]] = set()
        owned: list[list[int]] = [[] for _ in everywhere]  # the nodes of each block, forward and backward
        others: list[int] = []
        for i, b in enumerate(self.place):
            if b != SHARED:
                owned[b].append(i)
            elif self.index.kinds[i] is not Kind.INPUT:
                others.append(i)
        for length in range(1, min(_LONGEST, self.blocks.count) + 1):
            part = self._telling_blocks(length)
            excerpt = self._excerpt([*others, *(i for b in part for i in owned[b])])
            prices = (*_PRICES, *_LIGHT) if length == 1 else _PRICES[-1:]
            for price in prices:
                residuals = tuple(self._uniform(price, length, part))
                if residuals in seen:
                    continue
                seen.add(residuals)
                is_part = len(part) < len(everywhere)
                if not is_part or not self._add(measure(self, residuals, excerpt=excerpt), length, part):
                    if is_part:
                        residuals = tuple(self._uniform(price, length, everywhere))
                    self.plans.append(measure(self, residuals))
                    self._add(self.plans[-1], length, everywhere)

    def _telling_blocks(self, length: int) -> set[int]:
        """Blocks with each row of `length` blocks once, with its neighbours. A measurement here holds for all."""
        classes, count = self.repeats.classes, self.blocks.count
        blocks: set[int] = set()
        seen: set[tuple[int, ...]] = set()
        for start, stop in _cells(count, length):
            around = range(max(0, start - 1), min(count, stop + _AFTER))
            key = tuple([classes[b] for b in around])
            if key not in seen:
                seen.add(key)
                blocks.update(around)
        return blocks

    def _excerpt(self, nodes: list[int]) -> Excerpt:
        """These nodes, with the arguments that they read."""
        index, kinds = self.index, self.index.kinds
        read = {operand for i in nodes for operand in index.operands[i]}
        inside = {*nodes, *index.backward_inputs, *(operand for operand in read if kinds[operand] is Kind.INPUT)}
        return Excerpt(sorted(inside), [i for i in index.backward_sequence if i in inside])

    def _uniform(self, price: int, length: int, part: Collection[int]) -> list[int]:
        """The residuals of one choice for each row of `length` blocks, in the rows that have some of `part`."""
        residuals = set(self._of_all)
        for start, stop in _cells(self.blocks.count, length):
            if not any(b in part for b in range(start, stop)):
                continue
            residuals |= {r for r in self.blocks.waists[start] if self._can_save(r)}
            residuals.update(self._local(price, start, stop))
        return sorted(residuals)

    def _can_save(self, i: int) -> bool:
        return self.save[i] < NEVER and self.index.kinds[i] is not Kind.INPUT and not self.index.needs_tangent[i]

    def _local(self, price: int, start: int, stop: int) -> list[int]:
        """The residuals of blocks `start` to `stop` if a saved byte costs `price`. Computed once for equal blocks."""
        members = [i for nodes in self.repeats.members[start:stop] for i in nodes]
        key = (price, *self.repeats.classes[start:stop])
        places = self._solved.get(key)
        if places is None:
            place = {i: k for k, i in enumerate(members)}
            operands = [[place[o] for o in self.index.operands[i] if o in place] for i in members]
            byte = abs(price)
            save = [s if s >= NEVER else s * byte for s in (self.save[i] for i in members)]
            # A random operator that runs again has its generator's state saved.
            states = self.storages.states
            redo = [self.redo[i] + byte * states.get(i, 0) for i in members]
            if price < 0:
                redo = [
                    NEVER if self.save[i] < NEVER and flops(self.index.nodes[i]) else r
                    for i, r in zip(members, redo, strict=True)
                ]
            required = [k for k, i in enumerate(members) if i in self.required]
            places = self._solved[key] = cheapest_residuals(_Part(self.index, operands, members), save, redo, required)
        return [members[k] for k in places]

    def _add(self, plan: Measured, length: int, part: Collection[int]) -> bool:
        """Note the segments of a plan that was measured on the blocks of `part`. Whether these are enough for all."""
        number = len(self.measured)
        blocks, classes = self.blocks, self.repeats.classes
        profile = _BlockProfile(self, plan, frozenset(part))
        cell_by_classes: dict[tuple[int, ...], tuple[int, int]] = {}
        cells = list(_cells(blocks.count, length))
        for start, stop in cells:
            if profile.knows(start, stop):
                cell_by_classes.setdefault(tuple(classes[start:stop]), (start, stop))
        if any(
            not profile.knows(start, stop) and tuple(classes[start:stop]) not in cell_by_classes
            for start, stop in cells
        ):
            return False
        aligned = dict(cells)
        for start in range(blocks.count):
            # Equal blocks may start where the uniform plan has no cell: its rows are then shifted.
            stop = aligned.get(start, start + length)
            if stop > blocks.count or (start not in aligned and start < 1):
                continue
            cell = (
                (start, stop)
                if start in aligned and profile.knows(start, stop)
                else cell_by_classes.get(tuple(classes[start:stop]))
            )
            if cell is not None:
                self.segments.append(profile.segment(number, cell, start))
        self.measured.append(plan)
        self._kept.append(frozenset(plan.residuals))
        return True

    def assemble(self, segments: Sequence[Segment]) -> Measured:
        """The plan made of the segments, measured."""
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


def measure(
    space: Space,
    residuals: Sequence[int],
    moved: Collection[int] = (),
    price: float = 0.0,
    excerpt: Excerpt | None = None,
) -> Measured:
    """The peak and the cost of a choice. `moved`: the residuals sent to host memory and back, for `price` a byte. For
    an excerpt of the graph the result is right where nodes have their neighbours.
    """
    index = space.index
    used, computed = backward_needs(index, residuals, excerpt)
    nodes = range(len(index)) if excerpt is None else excerpt.nodes
    again = tuple([i for i in nodes if computed[i] and index.in_forward[i]])
    away = space.away.union(moved).intersection(used)
    liveness = space.storages.of_split(used, computed, away, excerpt)
    cost = sum([space.cost[i] for i in again]) + round(price * sum(space.storages.size[i] for i in away - space.away))
    return Measured(tuple(residuals), liveness.peak, cost, liveness, tuple(used), again, away)


class _BlockProfile:
    """A measured plan by blocks, for the blocks of `part`: bytes saved, costs, and the most bytes alive."""

    def __init__(self, space: Space, plan: Measured, part: frozenset[int]) -> None:
        self.space, self.part = space, part
        blocks, index, storages = space.blocks, space.index, space.storages
        self.saves, self.costs = [0] * blocks.count, [0] * blocks.count
        kept = {storages.root[i] for i in index.output_numbers}
        for r in {storages.root[i] for i in plan.used} - kept:
            if blocks.of[r] != SHARED and index.kinds[r] is not Kind.INPUT:
                self.saves[blocks.of[r]] += storages.size[r]
        for i in plan.again:
            if blocks.of[i] != SHARED:
                self.costs[blocks.of[i]] += space.cost[i]
                self.saves[blocks.of[i]] += storages.states.get(i, 0)
        self.before = [0, *itertools.accumulate(self.saves)]
        # Bytes of gradients that the backward of the blocks of `part` from each on leaves.
        left = [bytes_ if b in part else 0 for b, bytes_ in enumerate(space.gradients)]
        self.left = _from_each(left)
        self.forward, self.backward = _peaks(space, plan.liveness)

    def knows(self, start: int, stop: int) -> bool:
        """Whether these blocks were measured, and their neighbours."""
        count = self.space.blocks.count
        return all(b in self.part for b in range(max(0, start - 1), min(count, stop + _AFTER)))

    def segment(self, number: int, cell: tuple[int, int], start: int) -> Segment:
        """The segment that starts at `start` and is equal to the measured `cell`."""
        first, end = cell
        stop = start + end - first
        own = max(self.backward[first:end])
        if own:  # a block's backward may be empty
            own += self.space.left[stop] - self.left[end]
        needs = max(*self.forward[first:end], own) - self.before[first]
        return Segment(start, stop, sum(self.saves[first:end]), sum(self.costs[first:end]), needs, number, first)


def _cells(count: int, length: int) -> Iterator[tuple[int, int]]:
    """The rows of `length` blocks; the first block starts from the arguments, and is a row of its own."""
    starts = [0, *range(1, count, length)]
    yield from zip(starts, [*starts[1:], count], strict=True)


def _from_each(values: Sequence[int]) -> list[int]:
    """The sum of the values from each on, and 0 at the end."""
    return [*itertools.accumulate(reversed(values), initial=0)][::-1]


def _windows(space: Space) -> list[int]:
    """For each node of the backward, its backward's block; for all else, the block that makes it."""
    index, blocks, root = space.index, space.blocks, space.storages.root
    block_of = list(blocks.made_in)
    now = blocks.count - 1
    for i in index.backward_sequence:
        for operand in index.operands[i]:
            if not index.needs_tangent[operand]:
                b = blocks.of[root[operand]]
                if SHARED < b < now:
                    now = b
        block_of[i] = now
    return block_of


def _peaks(space: Space, liveness: Liveness) -> tuple[list[int], list[int]]:
    """For each block, the most bytes alive while its forward runs, and its backward."""
    count, place, needs_tangent = space.blocks.count, space.place, space.index.needs_tangent
    forward, backward = [0] * count, [0] * count
    now = 0
    for i, live in zip(liveness.forward.order, liveness.forward.bytes, strict=True):
        now = max(now, place[i])
        forward[now] = max(forward[now], live)
    waiting = 0  # the most while something is computed again for the next operator of the backward
    for i, live in zip(liveness.backward.order, liveness.backward.bytes, strict=True):
        waiting = max(waiting, live)
        if needs_tangent[i]:
            backward[place[i]] = max(backward[place[i]], waiting)
            waiting = 0
    backward[0] = max(backward[0], waiting, liveness.backward.after)
    forward[-1] = max(forward[-1], liveness.forward.after)
    return forward, backward


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """Bounds on the optimum for a budget: the plan costs `cost`, and no plan costs less than `bound`."""

    budget: int
    cost: int
    bound: int

    @property
    def gap(self) -> float:
        """How much dearer than the optimum the plan is at most, as a fraction of the bound."""
        if self.cost <= self.bound:
            return 0.0
        return self.cost / self.bound - 1 if self.bound else float("inf")

    def __str__(self) -> str:
        if not self.gap:
            return "proved to be the optimum"
        return f"at most {self.gap:.1%} above the optimum" if self.bound else "no bound was found"


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Some nodes of a graph by themselves; their operands outside exist in any case."""

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


# -------------------------------------------------------------------- equal blocks
# Equal blocks have the same operators on the same shapes, so a measurement of one block holds for all.
#
# Structure is the key: operators, arguments, shapes, strides, dtypes, which value reads which, the user's tags. Two
# blocks of one class correspond node by node, in their order.


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
        # A value from outside is described by its kind, not by its identity.
        return ("outside", index.kinds[number], layout_of(value_of(operand)), place.get(storages.root[number]))

    return structure_of(node, name), extra(i)
