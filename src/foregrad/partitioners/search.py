"""Which row of segments is the cheapest that keeps to a budget: dynamic programming over the blocks.

A segment needs its own bytes beside what the segments before it saved, and what it saves weighs on all later ones. The
shape is that of Rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019) over the options of
Rockmate (Zhao et al., ICML 2023). Bytes are counted in steps of the budget, and all budgets are looked at together. For
the least budget nothing but the fewest bytes saved matters, which takes one number a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .uniform import Segment, Space

__all__ = ["Search"]

_STEPS = 1024  # into which the bytes of a budget are divided
_NOWHERE = _STEPS + 1  # a column that holds what no row of segments reaches


class Search:
    """The rows of segments of a graph."""

    def __init__(self, space: Space) -> None:
        self.count = space.blocks.count
        by_start: list[list[Segment]] = [[] for _ in range(self.count)]
        for segment in space.segments:
            by_start[segment.start].append(segment)
        self.segments = [_worthwhile(segments) for segments in by_start]

    def least(self, most: int) -> tuple[int, list[Segment]]:
        """The least budget that some row of segments keeps to, and that row; at most `most`, which one does keep to."""
        low, high = 0, most
        row = self._leanest(high)
        while low < high:
            middle = (low + high) // 2
            found = self._leanest(middle)
            if found:
                high, row = middle, found
            else:
                low = middle + 1
        return high, row

    def _leanest(self, budget: int) -> list[Segment]:
        """The row that saves the least bytes within a budget; none if there is none."""
        saved: list[int | None] = [0, *(None for _ in range(self.count))]
        last: list[Segment | None] = [None] * (self.count + 1)
        for segments, before in zip(self.segments, saved, strict=False):
            if before is None:
                continue
            for segment in segments:
                after, known = before + segment.saves, saved[segment.stop]
                if before + segment.needs <= budget and (known is None or after < known):
                    saved[segment.stop], last[segment.stop] = after, segment
        row: list[Segment] = []
        at = last[self.count]
        while at is not None:
            row.append(at)
            at = last[at.start]
        return row[::-1]

    def rows(self, budgets: Sequence[int]) -> list[list[Segment]]:
        """The cheapest row for each budget; an empty one where none was found."""
        units = [max(1, -(-budget // _STEPS)) for budget in budgets]
        infinite = float("inf")
        shape = (len(budgets), _NOWHERE + 1)
        best = [torch.full(shape, infinite, dtype=torch.float64) for _ in range(self.count + 1)]
        best[0][:, 0] = 0.0
        columns = torch.arange(_STEPS + 1).repeat(len(budgets), 1)
        shifted: dict[int, torch.Tensor] = {}
        for start, segments in enumerate(self.segments):
            for segment in segments:
                before = shifted.get(segment.saves)
                if before is None:  # the column that each one is reached from
                    before = columns - torch.tensor([[_rounded(segment.saves, unit)] for unit in units])
                    before = shifted[segment.saves] = torch.where(before < 0, _NOWHERE, before)
                # How much earlier segments may have saved.
                room = [[(budget - segment.needs) // unit] for budget, unit in zip(budgets, units, strict=True)]
                offered = best[start].gather(1, before).add_(segment.costs)
                offered.masked_fill_(before > torch.tensor(room), infinite)
                there = best[segment.stop][:, : _STEPS + 1]
                torch.minimum(there, offered, out=there)
        return [self._row(best, k, budget, unit) for k, (budget, unit) in enumerate(zip(budgets, units, strict=True))]

    def _row(self, best: list[torch.Tensor], k: int, budget: int, unit: int) -> list[Segment]:
        """The segments that the cheapest row for budget k is made of."""
        by_stop: list[list[Segment]] = [[] for _ in range(self.count + 1)]
        for segments in self.segments:
            for segment in segments:
                by_stop[segment.stop].append(segment)
        cost, column = (float(value) for value in best[self.count][k].min(0))
        if cost == float("inf"):
            return []
        row: list[Segment] = []
        stop, saved = self.count, int(column)
        while stop:
            for segment in by_stop[stop]:
                before = saved - _rounded(segment.saves, unit)
                if 0 <= before <= (budget - segment.needs) // unit:
                    earlier = float(best[segment.start][k, before])
                    if earlier + segment.costs == cost:
                        break
            row.append(segment)
            stop, saved, cost = segment.start, before, earlier
        return row[::-1]


def _worthwhile(segments: list[Segment]) -> list[Segment]:
    """Without those that another of the same blocks beats in all respects."""
    kept: list[Segment] = []
    for one in sorted(segments, key=lambda s: (s.stop, s.costs, s.saves, s.needs)):
        if not any(other.stop == one.stop and other.saves <= one.saves and other.needs <= one.needs for other in kept):
            kept.append(one)
    return kept


def _rounded(saves: int, unit: int) -> int:
    """Up or down: what a row of segments really takes is measured, so it need not be on the safe side."""
    return (2 * saves + unit) // (2 * unit)
