"""A partition whose measured peak keeps to a budget in bytes, and that computes as little again as it can.

The peak is that of one whole step, as liveness.py simulates it for the very schedule that runs. The row of blocks is
cut into segments, each of them under one of the uniform plans (uniform.py); which segments, dynamic programming
decides: a segment needs its own bytes beside what the earlier ones saved, and what it saves weighs on all later
ones. The shape is that of Rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019) over the
options of Rockmate (Zhao et al., ICML 2023), on the joint graph, with no module per block.

Plans for small graphs are refined value by value (refine.py), and, where asked, by an integer program (exact.py).
Plans are made for a fixed row of budgets, whatever is asked, and the cheapest that keeps to the budget is taken. So a
smaller budget never has a larger peak.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..errors import BudgetError
from .blocks import find_blocks
from .costs import CostModel, analytic_cost, costs
from .exact import Proof, improved
from .hosts import can_offload
from .index import JointIndex
from .liveness import Storages
from .merge import merge_equal
from .policies import Policy
from .refine import refined
from .split import split
from .tables import in_bytes
from .uniform import Measured, Segment, Space, measure

__all__ = ["Budget", "Frontier", "Outcome", "budget_partition", "frontier", "read_budget"]

_STEPS = 2048  # into which bytes are divided while a plan is looked for
_BUDGETS = 24  # closer together towards the least, where a byte costs most


_PRICE_OF_MOVING = 200  # operations in the time that a byte takes there and back, most of it beside other work

_UNITS = {"": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate(("", "K", "M", "G", "T"))
    for unit, base in (("B", 1000), ("IB", 1024))
    if prefix or unit == "B"
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """A memory budget with the way to keep to it.

    `limit`: bytes, text with a unit, or a fraction. `solver_seconds`: how long an integer program may look for a better
    plan of a small graph, and for a bound (extra `solver`); 0.0 for not at all. `offload`: whether saved values may be
    in host memory; a number is the cost of a byte moved there and back, in the cost model's operations. `cost_model`:
    the time of computing a node again.
    """

    limit: int | float | str
    solver_seconds: float = 0.0
    offload: bool | float = False
    cost_model: CostModel = analytic_cost

    @property
    def price(self) -> float:
        """Of a byte moved to host memory and back; 0.0 where none may be."""
        return _PRICE_OF_MOVING if self.offload is True else float(self.offload)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a budget: its bytes, the least feasible and those of saving everything, and what is proved."""

    budget: int
    least: int
    most: int
    proof: Proof | None

    def __str__(self) -> str:
        known = "" if self.proof is None else f", {self.proof}"
        return f"{in_bytes(self.budget)}, of {in_bytes(self.least)} to {in_bytes(self.most)}{known}"


def read_budget(budget: Any) -> int | float | Budget:
    """A budget as bytes (an integer) or as a fraction (a float from 0 to 1); text is bytes with a unit, "600 MiB".

    Raises `ValueError` for what is neither.
    """
    if isinstance(budget, Budget):
        return dataclasses.replace(budget, limit=read_budget(budget.limit))  # type: ignore[arg-type]
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", budget)
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None:
            raise ValueError(f"{budget!r} is no memory budget: write a number with a unit, as '600 MiB' or '2GB'")
        return int(float(found[1]) * unit)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ValueError(
            f"{budget!r} is no memory budget: write bytes, a fraction from 0.0 to 1.0, or text as '600 MiB'"
        )
    if isinstance(budget, float):
        if not 0 <= budget <= 1:
            raise ValueError(
                f"a memory budget of {budget} is no fraction from 0.0 to 1.0; bytes are an integer or text"
            )
        return budget
    if budget < 0:
        raise ValueError(f"a memory budget of {budget} bytes is negative")
    return budget


def budget_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    memory_budget: int | float | str | Budget,
    static_lifetime_input_indices: Sequence[int] | None = None,
    static_lifetime_input_nodes: Any = None,
    cost_model: CostModel = analytic_cost,
    policy: Policy | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that one step, forward to end of backward, peaks within `memory_budget`.

    Besides the budget the arguments are those of PyTorch's partitioners. The budget is of bytes of live storage beyond
    what is alive before the call, gradients counted: an integer, text with a unit ("600 MiB"), or a float from 0 (the
    least feasible peak) to 1 (that of saving everything). `cost_model` gives the time of computing a node again. What
    `policy` says of a value is done, and the rest chosen.

    Raises `BudgetError`, with the least feasible budget, when none of the plans keeps to it; `ValueError` for what is
    no budget.
    """
    given = memory_budget if isinstance(memory_budget, Budget) else Budget(memory_budget, cost_model=cost_model)
    limit: Any = read_budget(given.limit)
    index = JointIndex(joint_module, num_fwd_outputs)
    index.policy = policy
    merge_equal(index)
    plans = frontier(index, given.cost_model)
    budget = plans.bytes_of(limit) if isinstance(limit, float) else limit
    plan = offloading(plans, budget, given.price) if given.price else plans.best(budget)
    is_proved = not plan.costs or (plans.is_complete and not given.price)
    proof = Proof(budget, plan.costs, plan.costs) if is_proved else None
    if given.solver_seconds and proof is None and not given.price:
        plan, proof = improved(plans.space, plan, budget, given.solver_seconds)
    halves = split(index, [index.nodes[i] for i in plan.residuals], plan.away)
    halves.forward.meta["memory_budget"] = Outcome(budget, plans.least, plans.most, proof)
    return halves.forward, halves.backward


@dataclasses.dataclass(frozen=True, slots=True)
class Frontier:
    """The plans that no other beats, from the one that saves most to the one that needs least."""

    index: JointIndex
    plans: tuple[Measured, ...]
    space: Space
    is_complete: bool  # they are optimal, since there was little to choose from and all of it was tried

    @property
    def most(self) -> int:
        """The peak of saving everything."""
        return self.plans[0].peak

    @property
    def least(self) -> int:
        """The least feasible peak."""
        return self.plans[-1].peak

    def bytes_of(self, fraction: float) -> int:
        """A budget as a fraction of the way from the least feasible peak to that of saving everything."""
        return self.least + int(fraction * (self.most - self.least))

    def best(self, budget: int) -> Measured:
        """The cheapest plan whose peak is at most `budget` bytes; raises `BudgetError`, with the least, if none is."""
        for plan in self.plans:
            if plan.peak <= budget:
                return plan
        raise _infeasible(budget, self.least, self.most)


def frontier(index: JointIndex, cost_model: CostModel = analytic_cost) -> Frontier:
    """The plans for a joint graph, between saving everything and the least peak."""
    storages = Storages(index)
    cost = costs(index, cost_model)
    space = Space(index, storages, cost, find_blocks(index, storages, cost))
    space.explore()
    plans = list(space.measured)
    search = _Search(space)
    most = plans[0].peak
    low, high = 0, most
    for _ in range(10):  # the least budget that some plan keeps to
        middle = (low + high) // 2
        if search.plan(middle) is None:
            low = middle
        else:
            high = middle
    for k in range(_BUDGETS + 1):
        segments = search.plan(high + (most - high) * k * k // _BUDGETS**2)
        if segments is not None:
            plans.append(space.assemble(segments))
    plans = _undominated(plans)
    others, is_complete = refined(space, plans)
    return Frontier(index, tuple(_undominated([*plans, *others])), space, is_complete)


def offloading(plans: Frontier, budget: int, price: float) -> Measured:
    """The cheapest plan within `budget` that moves values to host memory for `price` a byte, where that pays.

    Of each plan's values the first that are made go first: they wait longest. Raises `BudgetError` as `best` does.
    """
    space, best, least = plans.space, None, plans.least
    for plan in plans.plans:
        if best is not None and plan.costs >= best.costs:
            break
        values = sorted(can_offload(plans.index, plan.used) - space.away)
        moved = [i for i in values if space.storages.size[i]]
        found, count = plan, 0
        if plan.peak > budget:
            found, count = measure(space, plan.residuals, moved, price), len(moved)
            least = min(least, found.peak)
        low = 0
        while found.peak <= budget and low + 1 < count:
            middle = (low + count) // 2
            other = measure(space, plan.residuals, moved[:middle], price)
            if other.peak <= budget:
                found, count = other, middle
            else:
                low = middle
        if found.peak <= budget and (best is None or found.costs < best.costs):
            best = found
    if best is None:
        raise _infeasible(budget, least, plans.most)
    return best


def _infeasible(budget: int, least: int, most: int) -> BudgetError:
    return BudgetError(
        f"a memory budget of {budget} bytes can't be met: the least feasible peak is {least} bytes "
        f"({least / 2**20:.1f} MiB), and saving everything takes {most} ({most / 2**20:.1f} MiB). "
        "Ask for at least the least, or for a fraction from 0.0 to 1.0 of the way between the two."
    )


def _undominated(plans: list[Measured]) -> list[Measured]:
    found: list[Measured] = []
    for plan in sorted(plans, key=lambda p: (p.costs, p.peak)):
        if not found or plan.peak < found[-1].peak:
            found.append(plan)
    return found


class _Search:
    """The cheapest row of segments for a budget."""

    def __init__(self, space: Space) -> None:
        self.count = space.blocks.count
        self.from_start: list[list[Segment]] = [[] for _ in range(self.count)]
        for segment in space.segments:
            self.from_start[segment.start].append(segment)
        for start, segments in enumerate(self.from_start):
            self.from_start[start] = _worthwhile(segments)

    def plan(self, budget: int) -> list[Segment] | None:
        unit = max(1, -(-budget // _STEPS))
        infinite = float("inf")
        best = [torch.full((_STEPS + 1,), infinite, dtype=torch.float64) for _ in range(self.count + 1)]
        chosen = [torch.full((_STEPS + 1,), -1, dtype=torch.int64) for _ in range(self.count + 1)]
        reached: list[list[Segment]] = [[] for _ in range(self.count + 1)]
        best[0][0] = 0.0
        for start, segments in enumerate(self.from_start):
            here = best[start]
            for segment in segments:
                room = (budget - segment.needs) // unit  # units that earlier segments may have saved
                if room < 0:
                    continue
                saves = -(-segment.saves // unit)
                end = min(room, _STEPS - saves) + 1
                if end <= 0:
                    continue
                there = best[segment.stop][saves : saves + end]
                offered = here[:end] + segment.costs
                better = offered < there
                there[better] = offered[better]
                chosen[segment.stop][saves : saves + end][better] = len(reached[segment.stop])
                reached[segment.stop].append(segment)
        cost, at = best[self.count].min(0)
        if cost == infinite:
            return None
        path: list[Segment] = []
        stop, units = self.count, int(at)
        while stop:
            segment = reached[stop][int(chosen[stop][units])]
            path.append(segment)
            stop, units = segment.start, units - -(-segment.saves // unit)
        return path[::-1]


def _worthwhile(segments: list[Segment]) -> list[Segment]:
    """Without those that another of the same blocks beats in all respects."""
    kept: list[Segment] = []
    for one in sorted(segments, key=lambda s: (s.stop, s.costs, s.saves, s.needs)):
        if not any(other.stop == one.stop and other.saves <= one.saves and other.needs <= one.needs for other in kept):
            kept.append(one)
    return kept
