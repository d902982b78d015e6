"""Searches for the plans that no other beats: dynamic programming over rows of segments, steps between neighbours.

The cheapest row of segments that keeps to a budget is found block by block. A segment needs its own bytes beside the
residuals of the segments before it, and its residuals weigh on all later ones. The shape is that of Rotor (Beaumont et
al., "Optimal checkpointing for heterogeneous chains", 2019) over the options of Rockmate (Zhao et al., ICML 2023).
Bytes are counted in steps of the budget, and all budgets are looked at together. For the least budget only the bytes
saved matter, which takes one number a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from .._torch.engine import plain_execution
from ..errors import PartitionError
from ..partitioners.classify import Kind
from ..partitioners.cut import NEVER
from .uniform import Measured, Segment, Space, measure

_STEPS = 1024  # parts of the bytes of the largest budget of a magnitude
_ALIKE = 2  # times the bytes of the smallest


class Search:
    """The rows of segments of a graph."""

    def __init__(self, space: Space) -> None:
        self.count = space.blocks.count
        by_start: list[list[Segment]] = [[] for _ in range(self.count)]
        for segment in space.segments:
            by_start[segment.start].append(segment)
        self.segments = [_worthwhile(segments) for segments in by_start]

    def least(self, most: int) -> tuple[int, list[Segment]]:
        """The least budget that some row of segments keeps to, and that row. Some row must keep to `most` bytes."""
        low, high = 0, most
        row = self._leanest(high)
        while low < high:
            middle = (low + high) // 2
            leaner = self._leanest(middle)
            if leaner:
                high, row = middle, leaner
            else:
                low = middle + 1
        return high, row

    def _leanest(self, budget: int) -> list[Segment]:
        """The row that saves the fewest bytes within a budget; empty if no row keeps to it."""
        saved: list[int | None] = [0, *(None for _ in range(self.count))]
        last: list[Segment | None] = [None] * (self.count + 1)
        for segments, before in zip(self.segments, saved, strict=False):
            if before is None:
                continue
            for segment in segments:
                after, best = before + segment.saves, saved[segment.stop]
                if before + segment.needs <= budget and (best is None or after < best):
                    saved[segment.stop], last[segment.stop] = after, segment
        row: list[Segment] = []
        at = last[self.count]
        while at is not None:
            row.append(at)
            at = last[at.start]
        return row[::-1]

    def rows(self, budgets: Sequence[int]) -> list[list[Segment]]:
        """The cheapest row for each budget (these in ascending order); an empty one where none was found.

        Budgets of one magnitude are looked at together, in steps of equal bytes: then a segment is one sum and one
        minimum of stretches of a table.
        """
        rows: list[list[Segment]] = []
        while len(rows) < len(budgets):
            first = budgets[len(rows)]
            alike = [budget for budget in budgets[len(rows) :] if budget <= _ALIKE * first]
            rows += self._rows(alike)
        return rows

    @plain_execution()
    def _rows(self, budgets: Sequence[int]) -> list[list[Segment]]:
        """The rows for budgets of equal magnitude."""
        unit = max(1, -(-budgets[-1] // _STEPS))
        limits = torch.tensor([budget // unit for budget in budgets])
        infinite = float("inf")
        width = int(limits[-1]) + 1
        # best[b, k, c]: the least cost of the first b blocks, for budget k, if they save c steps.
        best = torch.full((self.count + 1, len(budgets), width), infinite, dtype=torch.float64)
        best[0, :, 0] = 0.0
        # Added where a budget does not reach so far.
        beyond = torch.zeros(len(budgets), width, dtype=torch.float64)
        beyond.masked_fill_(torch.arange(width) > limits.unsqueeze(1), infinite)
        reached = [0, *(-1 for _ in range(self.count))]  # the last column of the blocks' table that holds anything
        by_stop: list[list[_Step]] = [[] for _ in range(self.count + 1)]
        tables = list(best)
        for start, segments in enumerate(self.segments):
            for segment in segments:
                step = _Step(segment, _rounded(segment.saves, unit), _rounded(segment.needs, unit))
                many = min(reached[start], width - 1 - max(step.saves, step.needs)) + 1
                if many <= 0:
                    continue
                by_stop[segment.stop].append(step)
                reached[segment.stop] = max(reached[segment.stop], many - 1 + step.saves)
                offered = tables[start][:, :many] + beyond[:, step.needs : step.needs + many]
                there = tables[segment.stop][:, step.saves : step.saves + many]
                torch.minimum(there, offered.add_(segment.costs), out=there)
        return self._traced(best, limits.tolist(), by_stop)

    def _traced(self, best: torch.Tensor, limits: list[int], by_stop: list[list[_Step]]) -> list[list[Segment]]:
        """The segments of the cheapest row for each budget, read off the table from the end for all budgets at once."""
        _, height, width = best.shape
        flat = best.view(-1)
        costs, columns = best[self.count].min(1)
        rows: list[list[Segment]] = [[] for _ in limits]
        at = [
            (k, self.count, column, cost)
            for k, (column, cost) in enumerate(zip(columns.tolist(), costs.tolist(), strict=True))
            if cost != float("inf")
        ]
        while at:
            offers = [
                (k, step, column - step.saves, cost)
                for k, stop, column, cost in at
                for step in by_stop[stop]
                if 0 <= column - step.saves <= limits[k] - step.needs
            ]
            places = [(step.segment.start * height + k) * width + column for k, step, column, _ in offers]
            step_by_budget: dict[int, tuple[int, int, int, float]] = {}
            for (k, step, column, cost), earlier in zip(offers, flat[torch.tensor(places)].tolist(), strict=True):
                if k not in step_by_budget and earlier + step.segment.costs == cost:
                    step_by_budget[k] = (k, step.segment.start, column, earlier)
                    rows[k].append(step.segment)
            at = [one for one in step_by_budget.values() if one[1]]
        return [row[::-1] for row in rows]


class _Step(NamedTuple):
    """A segment with its bytes in steps of a budget."""

    segment: Segment
    saves: int
    needs: int


def _worthwhile(segments: list[Segment]) -> list[Segment]:
    """The segments, without segments that a rival over equal blocks beats in all respects."""
    kept: list[Segment] = []
    for one in sorted(segments, key=lambda s: (s.stop, s.costs, s.saves, s.needs)):
        if not any(other.stop == one.stop and other.saves <= one.saves and other.needs <= one.needs for other in kept):
            kept.append(one)
    return kept


def _rounded(saves: int, unit: int) -> int:
    """Bytes in units, rounded to the nearest: the real peak of a row of segments is measured afterwards."""
    return (2 * saves + unit) // (2 * unit)


# -------------------------------------------------------------------------------------------------------- small graphs
# Better plans for small graphs: every choice if there are few, else single values kept, dropped or exchanged.
#
# The exchange is a local search from all undominated plans at once (Paquete et al., "Pareto local optimum sets in the
# biobjective traveling salesman problem", 2004).
#
# Plans made of blocks save corresponding values in equal blocks, and treat a graph without blocks as one. If a graph
# has few values to choose from, simulating a choice takes less than a millisecond, so many are simulated.

_ALL_OF = 11  # up to so many values every choice is simulated: the optimum, proved
_MOST = 48  # beyond so many values nothing is tried
_TRIES = 700  # simulated nodes, in hundreds, that a refinement may take

_NOT_KEPT = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.VIEW)


def refined(space: Space, plans: Iterable[Measured]) -> tuple[list[Measured], bool]:
    """(plans found in the neighbourhood of `plans`, whether every choice was tried); no plans if values are many."""
    free = [i for i in _candidates(space) if space.redo[i] < NEVER]
    forced = frozenset(i for i in _candidates(space) if space.redo[i] >= NEVER)
    if not 0 < len(free) <= _MOST:
        return [], not free
    search = _Neighbours(space, forced, max(1, 100 * _TRIES // len(space.index)))
    if len(free) <= _ALL_OF:
        choices = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
        return [plan for choice in choices if (plan := search.measured(frozenset(choice))) is not None], True
    search.explore([frozenset(plan.residuals).intersection(free) for plan in plans], free)
    return search.undominated(), False


def undominated(plans: Iterable[Measured]) -> list[Measured]:
    """The plans that no other beats in both cost and peak, the cheapest first."""
    front: list[Measured] = []
    for plan in sorted(plans, key=lambda p: (p.costs, p.peak)):
        if not front or plan.peak < front[-1].peak:
            front.append(plan)
    return front


def _candidates(space: Space) -> Iterator[int]:
    """Values that may be saved, or computed again."""
    index = space.index
    for i, kind in enumerate(index.kinds):
        if 0 < space.save[i] < NEVER and index.for_backward[i] and kind not in _NOT_KEPT:
            yield i


class _Neighbours:
    def __init__(self, space: Space, forced: frozenset[int], tries: int) -> None:
        self.space, self.forced, self.tries = space, forced, tries
        self.plans: dict[frozenset[int], Measured | None] = {}

    def measured(self, choice: frozenset[int]) -> Measured | None:
        """The plan of a choice; None if the choice is infeasible, or no try is left."""
        if choice not in self.plans:
            if self.tries <= 0:
                return None
            self.tries -= 1
            try:
                self.plans[choice] = measure(self.space, sorted(choice | self.forced))
            except PartitionError:
                self.plans[choice] = None
        return self.plans[choice]

    def undominated(self) -> list[Measured]:
        """The measured plans that no other beats."""
        return undominated(filter(None, self.plans.values()))

    def explore(self, starts: Sequence[frozenset[int]], free: Sequence[int]) -> None:
        """Try the neighbours of each undominated plan, until there is nothing new or no try is left.

        A choice that trades memory for time may lead to a choice that is better in both, so none is dropped early.
        """
        for choice in starts:
            self.measured(choice)
        seen: set[frozenset[int]] = set()
        while self.tries > 0:
            plans = [frozenset(plan.residuals).intersection(free) for plan in self.undominated()]
            fresh = [choice for choice in plans if choice not in seen]
            if not fresh:
                return
            for choice in fresh:
                seen.add(choice)
                for move in _moves(choice, free):
                    self.measured(move)


def _moves(choice: frozenset[int], free: Sequence[int]) -> Iterator[frozenset[int]]:
    """One value more, one less, or one exchanged."""
    inside = [i for i in free if i in choice]
    outside = [i for i in free if i not in choice]
    yield from (choice | {i} for i in outside)
    yield from (choice - {i} for i in inside)
    yield from ((choice - {i}) | {j} for i in inside for j in outside)
