"""The cheapest row of segments that keeps to a budget: dynamic programming over the blocks.

A segment needs its own bytes beside the residuals of the segments before it, and its residuals weigh on all later ones.
The shape is that of Rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019) over the options of
Rockmate (Zhao et al., ICML 2023). Bytes are counted in steps of the budget, and all budgets are looked at together. For
the least budget only the bytes saved matter, which takes one number a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .uniform import Segment, Space

_STEPS = 1024  # into which the bytes of the largest budget of one magnitude are divided
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

        Budgets of one magnitude are looked at together, in steps of the same bytes: then a segment is one sum and one
        minimum of stretches of a table.
        """
        rows: list[list[Segment]] = []
        while len(rows) < len(budgets):
            first = budgets[len(rows)]
            alike = [budget for budget in budgets[len(rows) :] if budget <= _ALIKE * first]
            rows += self._rows(alike)
        return rows

    def _rows(self, budgets: Sequence[int]) -> list[list[Segment]]:
        """The rows for budgets of one magnitude."""
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
    """The segments without those that another over the same blocks beats in all respects."""
    kept: list[Segment] = []
    for one in sorted(segments, key=lambda s: (s.stop, s.costs, s.saves, s.needs)):
        if not any(other.stop == one.stop and other.saves <= one.saves and other.needs <= one.needs for other in kept):
            kept.append(one)
    return kept


def _rounded(saves: int, unit: int) -> int:
    """Bytes in units, rounded to the nearest: the real peak of a row of segments is measured afterwards."""
    return (2 * saves + unit) // (2 * unit)
