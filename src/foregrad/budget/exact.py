"""The cheapest plan for a budget as an integer program, for graphs of up to some hundred operators (extra `solver`).

The program is Checkmate's (Jain et al., MLSys 2020) for a schedule that runs each operator at most once more: time is
the operators of the backward that read values of the forward, and for each such operator and each value it says whether
the value is there and whether it is computed again just before. Memory is counted while each operator of the backward
runs, while each recomputed one does, and through the forward. The program chooses when an operator is computed again,
while the schedule that runs (split.py) does it right before the first use; so the program's optimum is a lower bound of
the true one, and each plan that it finds is simulated before it is believed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

from ..partitioners.classify import Kind
from ..partitioners.cut import NEVER
from .uniform import Measured, Proof, Space, measure

_MOST = 12_000  # values times times: larger graphs are not tried
_GAP = 0.002  # the solver stops at this share
_ROUNDS = 4  # with a little less budget each, where the program's plan turned out to need more than it counts

_GIVEN = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER)
_NO_OPERATOR = (*_GIVEN, Kind.ITEM, Kind.VIEW)


def improved(space: Space, plan: Measured, budget: int, seconds: float) -> tuple[Measured, Proof]:
    """The best plan for `budget` that is found in about `seconds`, starting from `plan`, and the proof for it.

    For a graph that is too large, or has effects in its backward, `plan` comes back. Raises `ImportError` if HiGHS is
    not installed.
    """
    if importlib.util.find_spec("highspy") is None:
        raise ImportError("an exact plan needs HiGHS: pip install 'foregrad[solver]'")
    if not plan.costs:
        return plan, Proof(budget, 0, 0)
    model = _Model(space) if _is_suited(space) else None
    if model is None or len(model.values) * len(model.times) > _MOST:
        return plan, Proof(budget, plan.costs, 0)
    bound, room = 0, budget
    end = time.monotonic() + seconds
    for attempt in range(_ROUNDS):
        solved = model.solve(room, plan.costs, max(0.1, end - time.monotonic()))
        if not attempt:
            bound = min(solved.bound, plan.costs)
        if solved.saved is None:
            break
        other = measure(space, sorted(solved.saved))
        if other.peak <= budget:
            plan = min(plan, other, key=lambda p: (p.costs, p.peak))
            break
        room -= other.peak - budget
        if time.monotonic() > end:
            break
    return plan, Proof(budget, plan.costs, bound)


def _is_suited(space: Space) -> bool:
    index = space.index
    if index.written or index.replays or any(not index.needs_tangent[i] for i in index.gradient_numbers):
        return False
    return all(index.in_forward[i] or index.needs_tangent[i] for i in index.once)


@dataclasses.dataclass(frozen=True, slots=True)
class _Solved:
    bound: int
    saved: set[int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Time:
    """An operator of the backward that reads values of the forward. `before`, `during`: bytes of the backward's own
    values while its operands are recomputed, and while it runs; `since`: the most since the time before it.
    """

    reads: frozenset[int]
    before: int
    during: int
    since: int


class _Model:
    """The integer program of a graph, for any budget."""

    def __init__(self, space: Space) -> None:
        self.space = space
        index, storages = space.index, space.storages
        self.root = storages.root
        self.held = {self.root[i] for i in index.output_numbers}
        self.made_by: dict[int, int] = {}
        self.results: dict[int, list[int]] = {}
        self.reads: dict[int, frozenset[int]] = {}
        self.times = self._find_times()
        needed = set().union(*(t.reads for t in self.times)) if self.times else set()
        for i in range(len(index) - 1, -1, -1):
            if index.needs_tangent[i] or index.kinds[i] in _NO_OPERATOR:
                continue
            results = [i] if i not in storages.results else [r for r, _ in storages.results[i] if r is not None]
            results = [r for r in results if r in needed]
            if results:
                self.results[i], self.reads[i] = results, self._values_read(i)
                self.made_by.update(dict.fromkeys(results, i))
                if space.redo[i] < NEVER:
                    needed |= self.reads[i]
        self.values = sorted(self.made_by)
        self.operators = sorted(u for u in self.results if space.redo[u] < NEVER)
        self.latest = self._latest_uses()
        self.readers: dict[int, list[int]] = {}
        for u in self.operators:
            for r in self.reads[u]:
                self.readers.setdefault(r, []).append(u)
        parts = storages.results
        # Bytes in use while an operator is computed again, beside the values that it makes.
        self.unread = {
            u: sum(n for r, n in parts.get(u, ()) if r not in self.results[u]) + storages.workspace[u]
            for u in self.operators
        }

    def _values_read(self, i: int) -> frozenset[int]:
        index = self.space.index
        roots = {self.root[o] for o in index.operands[i] if not index.needs_tangent[o]}
        return frozenset(r for r in roots if index.kinds[r] not in _GIVEN)

    def _find_times(self) -> list[_Time]:
        index, storages = self.space.index, self.space.storages
        order = [i for i, bit in enumerate(index.for_backward) if bit and index.needs_tangent[i]]
        order = [i for i in order if index.kinds[i] is not Kind.INPUT]
        for i in index.backward_inputs:
            storages.size[i] = max(storages.size[i], index.bytes_of(i))
        others = sum(storages.size[r] for r in self.held)
        returned = {self.root[i] for i in index.gradient_numbers} | storages.held_tangents(index.backward_inputs)
        line = storages.timeline(order, set(index.backward_inputs), returned, others)
        times, since = [], 0
        for k, i in enumerate(order):
            reads = self._values_read(i)
            if reads:
                own = sum(size for _, size in storages.results[i]) if i in storages.results else 0
                own = (own or (storages.size[i] if self.root[i] == i else 0)) + storages.workspace[i]
                times.append(_Time(reads, line.bytes[k] - own, line.bytes[k], since))
                since = 0
            else:
                since = max(since, line.bytes[k])
        return times

    def _latest_uses(self) -> dict[int, int]:
        """For each value, the last time at which it can be of use."""
        latest: dict[int, int] = {}
        for k, at in enumerate(self.times):
            for r in at.reads:
                latest[r] = k
        for u in reversed(self.operators):
            last = max(latest.get(r, -1) for r in self.results[u])
            for r in self.reads[u]:
                latest[r] = max(latest.get(r, -1), last)
        return latest

    def solve(self, budget: int, limit: int, seconds: float) -> _Solved:
        """The optimum within `budget`; some plan costs `limit`."""
        return _Program(self, budget, limit).solve(seconds)


class _Program:
    """The integer program for one budget. Bytes are counted in budgets, costs in limits."""

    def __init__(self, model: _Model, budget: int, limit: int) -> None:
        from highspy import Highs

        self.model, self.limit, self.budget = model, limit, budget
        self.solver: Any = Highs()
        self.solver.silent()
        space = model.space
        self.size = {r: space.storages.size[r] / max(budget, 1) for r in model.values}
        last = model.latest
        self.saved = {r: self._variable(r in self.held or space.save[r] < NEVER) for r in model.values}
        self.there: dict[tuple[int, int], int] = {}  # before anything is computed again for a time
        self.alive: dict[tuple[int, int], int] = {}  # while the operator of a time runs
        self.again: dict[tuple[int, int], int] = {}
        self.until: dict[tuple[int, int, int], int] = {}
        self.carried: dict[tuple[int, int], int] = {}
        for k, at in enumerate(model.times):
            for r in model.values:
                if k <= last.get(r, -1):
                    self.there[r, k] = self._variable(True, whole=False)
                    self.alive[r, k] = self._variable(True, whole=False, least=1.0 if r in at.reads else 0.0)
        for u in model.operators:
            for k in range(max(last.get(r, -1) for r in model.results[u]) + 1):
                self.again[u, k] = self._variable(True, cost=space.redo[u] / limit)
        self._flow()
        self._memory()
        row = [(self.again[u, k], space.redo[u] / limit) for u, k in self.again]
        self._row(row, 1.0)

    @property
    def held(self) -> set[int]:
        return self.model.held

    def _variable(self, allowed: bool, *, whole: bool = True, least: float = 0.0, cost: float = 0.0) -> int:
        at = self.solver.getNumCol()
        self.solver.addCol(cost, least, 1.0 if allowed else 0.0, 0, [], [])
        if whole:
            from highspy import HighsVarType

            self.solver.changeColIntegrality(at, HighsVarType.kInteger)
        return int(at)

    def _row(self, row: Sequence[tuple[int, float]], most: float) -> None:
        """The sum of the row's terms is at most `most`."""
        terms: dict[int, float] = {}
        for column, factor in row:
            terms[column] = terms.get(column, 0.0) + factor
        self.solver.addRow(-self.solver.getInfinity(), most, len(terms), list(terms), list(terms.values()))

    def _made(self, r: int, k: int) -> list[tuple[int, float]]:
        """The term that says that value r is computed again for time k."""
        column = self.again.get((self.model.made_by[r], k))
        return [] if column is None else [(column, -1.0)]

    def _flow(self) -> None:
        """A value is present if it was saved or recomputed; operators read present values and run once more at most."""
        model = self.model
        for (r, k), column in self.there.items():
            before = self.alive[r, k - 1] if k else self.saved[r]
            self._row([(column, 1.0), (before, -1.0)], 0.0)
            self._row([(self.alive[r, k], 1.0), (column, -1.0), *self._made(r, k)], 0.0)
        for (u, k), column in self.again.items():
            for r in model.reads[u]:
                self._row([(column, 1.0), (self.there[r, k], -1.0), *self._made(r, k)], 0.0)
        for u in model.operators:
            runs = [(column, 1.0) for (other, _), column in self.again.items() if other == u]
            results = model.results[u]
            self._row([*runs, (self.saved[results[0]], 1.0)] if len(results) == 1 else runs, 1.0)

    def _memory(self) -> None:
        model, size, budget, space = self.model, self.size, max(self.budget, 1), self.model.space
        counted = [r for r in model.values if r not in self.held and size[r]]
        self._forward(counted)
        for k, at in enumerate(model.times):
            here = [r for r in counted if (r, k) in self.there]
            self._row([(self.alive[r, k], size[r]) for r in here], 1.0 - at.during / budget)
            if at.since:
                self._row([(self.there[r, k], size[r]) for r in here], 1.0 - at.since / budget)
            for u in model.operators:
                if (u, k) in self.again:
                    row = [(column, size[r]) for r in here for column in self._present(r, u, k)]
                    unread = sum(space.storages.size[r] for r in model.results[u] if r in self.held)
                    row.append((self.again[u, k], (unread + model.unread[u]) / budget))
                    self._row(row, 1.0 - at.before / budget)

    def _present(self, r: int, u: int, k: int) -> list[int]:
        """The columns with a sum that says that value r is in memory while u is computed again for time k."""
        maker = self.model.made_by[r]
        if maker < u:
            return [self._until(r, u, k)]
        if maker == u:
            return [self._carried(r, k), self.again[u, k]]
        return [self._carried(r, k)]

    def _until(self, r: int, u: int, k: int) -> int:
        """The column for: value r, made before u, is present when u is recomputed: u or a later node reads it."""
        at = self.alive[r, k]
        for v in reversed(self.model.readers.get(r, ())):
            if v < u:
                break
            if (v, k) not in self.again:
                continue
            longer = self.until.get((r, v, k))
            if longer is None:
                longer = self.until[r, v, k] = self._variable(True, whole=False)
                self._row([(at, 1.0), (longer, -1.0)], 0.0)
                self._row([(self.again[v, k], 1.0), (longer, -1.0)], 0.0)
            at = longer
        return at

    def _carried(self, r: int, k: int) -> int:
        """The column that says that value r is present at time k, not recomputed for it, and read then."""
        column = self.carried.get((r, k))
        if column is None:
            column = self.carried[r, k] = self._variable(True, whole=False)
            uses = [
                self.alive[r, k],
                *(self.again[v, k] for v in self.model.readers.get(r, ()) if (v, k) in self.again),
            ]
            for one in uses:
                self._row([(one, 1.0), *self._made(r, k), (column, -1.0)], 0.0)
        return column

    def _forward(self, counted: Sequence[int]) -> None:
        """Bytes through the forward, where saved values stay."""
        space, budget = self.model.space, max(self.budget, 1)
        index, root = space.index, self.model.root
        order = [i for i, bit in enumerate(index.in_forward) if bit]
        line = space.storages.timeline(order, set(), set(self.held))
        last: dict[int, int] = {}
        for k, i in enumerate(order):
            for r in (root[i], *(root[o] for o in index.operands[i])):
                last[r] = k
        ends = sorted((last.get(r, len(order)), r) for r in counted)
        for k, live in enumerate([*line.bytes, line.after]):
            row = [(self.saved[r], self.size[r]) for end, r in ends if end < k]
            if row:
                self._row(row, 1.0 - live / budget)
        row = [(self.saved[r], self.size[r]) for r in counted]
        self._row(row, 1.0 - line.after / budget)

    def solve(self, seconds: float) -> _Solved:
        solver = self.solver
        for name, value in (("time_limit", seconds), ("mip_rel_gap", _GAP), ("threads", 1), ("random_seed", 0)):
            solver.setOptionValue(name, value)
        solver.run()
        info = solver.getInfo()
        bound = max(0, int(info.mip_dual_bound * self.limit)) if abs(info.mip_dual_bound) < 1e20 else 0
        values = solver.getSolution().col_value
        if info.primal_solution_status != 2 or not len(values):
            return _Solved(bound, None)
        return _Solved(bound, {r for r, column in self.saved.items() if values[column] > 0.5})
