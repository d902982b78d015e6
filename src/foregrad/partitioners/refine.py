"""Better plans for small graphs: every choice where there are few, and else single values kept, dropped or exchanged.

The second is a local search from all plans at once that no other beats (Paquete et al., "Pareto local optimum sets in
the biobjective traveling salesman problem", 2004).

Plans made of blocks keep the same in equal blocks, and treat a graph without blocks as one. Where a graph has few
values to choose from, simulating a choice takes less than a millisecond, so many are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..errors import PartitionError
from .classify import Kind
from .cut import NEVER
from .uniform import Measured, Space, measure

__all__ = ["refined"]

_ALL_OF = 11  # up to so many values every choice is simulated: the optimum, proved
_MOST = 48  # beyond so many values nothing is tried
_TRIES = 700  # simulated nodes, in hundreds, that a refinement may take

_NOT_KEPT = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.VIEW)


def refined(space: Space, plans: Iterable[Measured]) -> tuple[list[Measured], bool]:
    """(plans found by looking round the given ones, whether these are all there are); none where values are many."""
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

    def undominated(self) -> list[Measured]:
        """The measured plans that no other beats."""
        found: list[Measured] = []
        for plan in sorted(filter(None, self.known.values()), key=lambda p: (p.costs, p.peak)):
            if not found or plan.peak < found[-1].peak:
                found.append(plan)
        return found

    def explore(self, starts: Sequence[frozenset[int]], free: Sequence[int]) -> None:
        """Look round each plan that no other beats, until there is nothing new or no try is left.

        A choice that trades memory for time may lead to one that is better in both, so all of them are gone on from.
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
    """One value more, one less, or one in another's place."""
    inside = [i for i in free if i in choice]
    outside = [i for i in free if i not in choice]
    yield from (choice | {i} for i in outside)
    yield from (choice - {i} for i in inside)
    yield from ((choice - {i}) | {j} for i in inside for j in outside)
