"""Better plans for small graphs: every choice where there are few, and else single values kept, dropped or exchanged.

Plans made of blocks keep the same in equal blocks, and treat a graph without blocks as one. Where a graph has few
values to choose from, simulating a choice takes less than a millisecond, so many are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..errors import PartitionError
from .classify import Kind
from .cut import NEVER
from .uniform import Measured, Space, measure

__all__ = ["refined"]

_ALL_OF = 11  # up to so many values every choice is simulated: the optimum, proved
_MOST = 32  # beyond so many values nothing is tried
_TRIES = 2000  # simulated nodes, in hundreds, that a refinement may take

_NOT_KEPT = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.VIEW)


def refined(space: Space, plans: Sequence[Measured]) -> list[Measured]:
    """Plans found by looking round the given ones; none for a graph with many values."""
    free = [i for i in _candidates(space) if space.redo[i] < NEVER]
    forced = frozenset(i for i in _candidates(space) if space.redo[i] >= NEVER)
    if not 0 < len(free) <= _MOST:
        return []
    search = _Neighbours(space, forced, max(1, 100 * _TRIES // len(space.index)))
    if len(free) <= _ALL_OF:
        choices = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
        return [plan for choice in choices if (plan := search.measured(frozenset(choice))) is not None]
    found = []
    for start in plans:
        best = start
        choice = frozenset(start.residuals).intersection(free)
        while (better := search.better(choice, best, free, start.peak)) is not None:
            choice, best = better
        found.append(best)
    choice = frozenset(plans[-1].residuals).intersection(free)
    while (lower := search.lower(choice, free)) is not None:
        choice, best = lower
        found.append(best)
    return found


def _candidates(space: Space) -> Iterator[int]:
    """Values that may be saved, or computed again."""
    index = space.index
    for i, kind in enumerate(index.kinds):
        if 0 < space.save[i] < NEVER and index.for_backward[i] and kind not in _NOT_KEPT:
            yield i


class _Neighbours:
    def __init__(self, space: Space, forced: frozenset[int], tries: int) -> None:
        self.space, self.forced, self.tries = space, forced, tries
        self.known: dict[frozenset[int], Measured | None] = {}

    def measured(self, choice: frozenset[int]) -> Measured | None:
        """The plan of a choice; None where it is none, or no try is left."""
        if choice not in self.known:
            if self.tries <= 0:
                return None
            self.tries -= 1
            try:
                self.known[choice] = measure(self.space, sorted(choice | self.forced))
            except PartitionError:
                self.known[choice] = None
        return self.known[choice]

    def better(
        self, choice: frozenset[int], plan: Measured, free: Sequence[int], budget: int
    ) -> tuple[frozenset[int], Measured] | None:
        """A neighbour that costs less within the budget, or as much with a lower peak."""
        for move in _moves(choice, free):
            other = self.measured(move)
            if other is not None and other.peak <= budget and (other.costs, other.peak) < (plan.costs, plan.peak):
                return move, other
        return None

    def lower(self, choice: frozenset[int], free: Sequence[int]) -> tuple[frozenset[int], Measured] | None:
        """A neighbour with a lower peak."""
        plan = self.measured(choice)
        for move in _moves(choice, free) if plan is not None else ():
            other = self.measured(move)
            if other is not None and plan is not None and other.peak < plan.peak:
                return move, other
        return None


def _moves(choice: frozenset[int], free: Sequence[int]) -> Iterator[frozenset[int]]:
    """One value more, one less, or one in another's place."""
    inside = [i for i in free if i in choice]
    outside = [i for i in free if i not in choice]
    yield from (choice | {i} for i in outside)
    yield from (choice - {i} for i in inside)
    yield from ((choice - {i}) | {j} for i in inside for j in outside)
