"""Better plans for small graphs: every choice if there are few, else single values kept, dropped or exchanged.

The exchange is a local search from all undominated plans at once (Paquete et al., "Pareto local optimum sets in the
biobjective traveling salesman problem", 2004).

Plans made of blocks save corresponding values in equal blocks, and treat a graph without blocks as one. If a graph has
few values to choose from, simulating a choice takes less than a millisecond, so many are simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..errors import PartitionError
from .classify import Kind
from .cut import NEVER
from .uniform import Measured, Space, measure

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

        A choice that trades memory for time may lead to one that is better in both, so none is dropped early.
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
