"""Partitions with a measured peak within a budget in bytes, with as little recomputation as possible.

The peak is a whole step's, simulated by liveness.py for the schedule that runs. The row of blocks is cut into segments,
each under one of the uniform plans (uniform.py). Dynamic programming chooses the segments (search.py), on the joint
graph, with no module per block.

Plans for small graphs are refined value by value, and, where asked, by an integer program (exact.py). Plans are made
for a fixed row of budgets, independent of the caller's, and the cheapest plan within the caller's budget is taken. So a
smaller budget never has a larger peak.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import is_operator
from ..errors import BudgetError
from ..locks import cached_property
from ..partitioners.classify import Kind
from ..partitioners.costs import CostModel, analytic_cost, costs, flops
from ..partitioners.cut import NEVER, cheapest_residuals
from ..partitioners.index import JointIndex, merge_equal
from ..partitioners.instead import can_offload, device_of, state_size
from ..partitioners.liveness import Storages
from ..partitioners.mincut import choose_min_cut
from ..partitioners.policies import Policy
from ..partitioners.report import Table, amount, in_bytes
from ..partitioners.split import split
from .blocks import find_blocks
from .search import Search, refined, undominated
from .uniform import Measured, Proof, Segment, Space, measure

_DEVICES = ("cpu", "cuda")
_WORTH = 4  # a result must be larger than this times the bytes of a state
_BUDGETS = 64  # closer together towards the least, where a byte costs most


_PRICE_OF_MOVING = 200  # operations in the time of a byte's transfer there and back, mostly beside further work

_UNITS = {
    prefix + unit: base**power
    for power, prefix in enumerate(("", "K", "M", "G", "T"))
    for unit, base in (("B", 1000), ("IB", 1024))
    if prefix or unit == "B"
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """A memory budget and its settings.

    `limit`: bytes, text with a unit, or a fraction. `solver_seconds`: how long an integer program may look for a better
    plan of a small graph, and for a bound (extra `solver`); 0.0 for not at all. `offload`: whether saved values may be
    in host memory; a number is the cost of a byte moved there and back, in the cost model's operations. `cost_model`:
    the time of computing a node again, in operations. `replay`: whether random operators may run again from a saved
    state of their generator, with backends that keep a graph's order; replayed operators have no second derivative.

    Examples:
        >>> import torch, foregrad
        >>> budget = foregrad.Budget("1 MiB", replay=False)
        >>> f = foregrad.compile(lambda x: x.sin().exp().sum(), backend="eager", memory_budget=budget)
        >>> f(torch.zeros(2, requires_grad=True)).item()
        2.0
    """

    limit: int | float | str
    solver_seconds: float = 0.0
    offload: bool | float = False
    cost_model: CostModel = analytic_cost
    replay: bool = True

    @property
    def price(self) -> float:
        """The cost of a byte moved to host memory and back; 0.0 if nothing may be moved."""
        return _PRICE_OF_MOVING if self.offload is True else float(self.offload)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a budget: its bytes, the least feasible peak, the peak of saving everything, and the proof."""

    budget: int
    least: int
    most: int
    proof: Proof | None

    @classmethod
    def of(cls, data: Any) -> Outcome:
        """The outcome that gave `data()`."""
        return cls(**data | {"proof": None if data["proof"] is None else Proof(**data["proof"])})

    def data(self) -> dict[str, Any]:
        """The outcome as JSON, for caches."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        proof = "" if self.proof is None else f", {self.proof}"
        return f"{in_bytes(self.budget)}, of {in_bytes(self.least)} to {in_bytes(self.most)}{proof}"


def read_budget(budget: Any) -> int | float | Budget:
    """A budget as bytes (an integer) or as a fraction (a float from 0 to 1); text is bytes with a unit, "600 MiB".

    Raises `ValueError` for anything else.
    """
    if isinstance(budget, Budget):
        return dataclasses.replace(budget, limit=read_budget(budget.limit))  # type: ignore[arg-type]
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", budget)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{budget!r} is no memory budget: write a number with a unit, as '600 MiB' or '2GB'")
        return int(float(match[1]) * unit)
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


def partition_within(
    memory_budget: Any, *, policy: Policy | None = None, replay: bool = False
) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """`budget_partition` with its settings, checked."""
    split = functools.partial(budget_partition, memory_budget=read_budget(memory_budget), replay=replay)
    return split if policy is None else functools.partial(split, policy=policy)


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
    replay: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that one step, forward to end of backward, peaks within `memory_budget`.

    Besides the budget the arguments are as in PyTorch's partitioners. The budget counts bytes of live storage
    beyond the storage before the call, gradients included: an integer, text with a unit ("600 MiB"), or a float from
    0 (the least feasible peak) to 1 (saving everything). `cost_model` gives the time of recomputing a node. The
    answers of `policy` are followed, and the other values chosen. With `replay` random operators may run again from a
    saved state of their generator; then the halves must run node by node in their order.

    Raises `BudgetError`, with the least feasible budget, if no plan fits; `ValueError` for anything that is no
    budget.

    Examples:
        >>> import functools, torch, foregrad
        >>> split = functools.partial(foregrad.budget_partition, memory_budget=0.5)
        >>> f = foregrad.aot_function(lambda x: x.sin().exp().sum(), foregrad.nop, partition_fn=split)
        >>> x = torch.zeros(2, requires_grad=True)
        >>> f(x).backward()
        >>> x.grad
        tensor([1., 1.])
    """
    asked = memory_budget if isinstance(memory_budget, Budget) else Budget(memory_budget, cost_model=cost_model)
    limit: Any = read_budget(asked.limit)
    index = JointIndex(joint_module, num_fwd_outputs)
    index.policy = policy
    merge_equal(index)
    if replay and asked.replay:
        index.replays = can_replay(index)
    plans = Frontier(index, asked.cost_model)
    budget = plans.bytes_of(limit) if isinstance(limit, float) else limit
    plan = offloading(plans, budget, asked.price) if asked.price else plans.best(budget)
    is_proved = not plan.costs or (plans.is_complete and not asked.price)
    proof = Proof(budget, plan.costs, plan.costs) if is_proved else None
    if asked.solver_seconds and proof is None and not asked.price:
        from .exact import improved  # an extra's

        plan, proof = improved(plans.space, plan, budget, asked.solver_seconds)
    halves = split(index, [index.nodes[i] for i in plan.residuals], plan.away)
    halves.forward.meta["memory_budget"] = Outcome(budget, plans.least, plans.most, proof)
    return halves.forward, halves.backward


def saving_partition(
    joint_module: fx.GraphModule, _joint_inputs: Any, *, num_fwd_outputs: int, fraction: float, **facts: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that saved values take at most `fraction` of the bytes that the min-cut partition saves,
    inputs not counted: the meaning of PyTorch's `activation_memory_budget`. If no plan does, the least is saved.
    """
    index = JointIndex(joint_module, num_fwd_outputs)
    merge_equal(index)
    space = (plans := Frontier(index)).space
    chosen = set(choose_min_cut(index, facts.get("static_lifetime_input_indices")))
    usual = measure(space, [i for i, node in enumerate(index.nodes) if node in chosen])

    def rank(plan: Measured) -> tuple[float, int]:
        saved = plan.liveness.saved_bytes
        return max(saved, fraction * usual.liveness.saved_bytes), plan.costs

    freely = [redo if redo >= NEVER else 0 for redo in space.redo]
    bare = measure(space, cheapest_residuals(index, space.save, freely, space.required))
    plan = min((usual, bare, *[choice.plan for choice in plans._choices]), key=rank)
    halves = split(index, [index.nodes[i] for i in plan.residuals], plan.away)
    return halves.forward, halves.backward


class Frontier:
    """The plans for a joint graph, between saving everything and the least peak. Each is measured when needed.

    `is_complete`: every choice was tried, so the plans are optimal.
    """

    def __init__(self, index: JointIndex, cost_model: CostModel = analytic_cost) -> None:
        storages = Storages(index)
        cost = costs(index, cost_model)
        self.index = index
        self.space = space = Space(index, storages, cost, find_blocks(index, storages, cost))
        space.explore()
        search = Search(space)
        self.most = space.measured[0].peak  # of saving everything
        least, leanest = search.least(self.most)
        budgets = [least + (self.most - least) * k * k // _BUDGETS**2 for k in range(_BUDGETS + 1)]
        rows = {tuple(row) for row in [leanest, *search.rows(budgets)] if row}
        choices = [_Choice.of_plan(plan) for plan in space.plans] + [_Choice.of_row(space, row) for row in rows]
        others, self.is_complete = refined(space, (choice.plan for choice in choices))
        choices += map(_Choice.of_plan, others)
        self._choices = sorted(choices, key=lambda choice: (choice.costs, choice.bound))

    @property
    def plans(self) -> tuple[Measured, ...]:
        """The undominated plans, from the one that saves most to the one that needs least."""
        return tuple(undominated([choice.plan for choice in self._choices]))

    @cached_property
    def least(self) -> int:
        """The least feasible peak."""
        peak = self.most
        for choice in sorted(self._choices, key=lambda choice: choice.bound):
            if choice.bound >= peak:
                break
            peak = min(peak, choice.peak)
        return peak

    def bytes_of(self, fraction: float) -> int:
        """The budget at `fraction` of the way from the least feasible peak to the peak of saving everything."""
        return self.least + int(fraction * (self.most - self.least))

    def best(self, budget: int) -> Measured:
        """The cheapest plan with a peak of at most `budget` bytes; raises `BudgetError`, with the least, if none is.

        The order of the plans does not depend on the budget, and the first plan within the budget is taken. So a
        smaller budget never takes an earlier plan.
        """
        for choice in self._choices:
            if choice.bound <= budget and choice.peak <= budget:
                return choice.plan
        raise _infeasible(budget, self.least, self.most)


class _Choice:
    """A plan that is measured on demand. `bound`: the peak predicted from its pieces, a lower bound of `peak`. A plan
    with too large a prediction need not be measured.
    """

    def __init__(self, costs: int, bound: int, measure: Callable[[], Measured]) -> None:
        self.costs, self.bound, self._measure = costs, bound, measure

    @classmethod
    def of_plan(cls, plan: Measured) -> _Choice:
        return cls(plan.costs, plan.peak, lambda: plan)

    @classmethod
    def of_row(cls, space: Space, row: Sequence[Segment]) -> _Choice:
        before = itertools.accumulate((segment.saves for segment in row), initial=0)
        bound = max(saved + segment.needs for saved, segment in zip(before, row, strict=False))
        return cls(sum(segment.costs for segment in row), bound, lambda: space.assemble(row))

    @cached_property
    def plan(self) -> Measured:
        return self._measure()

    @property
    def peak(self) -> int:
        return max(self.plan.peak, self.bound)


def offloading(plans: Frontier, budget: int, price: float) -> Measured:
    """The cheapest plan within `budget` that moves values to host memory for `price` a byte, where that pays.

    The values that are made first are moved first, since they wait longest. Raises `BudgetError` as `best` does.
    """
    space, best, least = plans.space, None, plans.least
    for plan in plans.plans:
        if best is not None and plan.costs >= best.costs:
            break
        values = sorted(can_offload(plans.index, plan.used) - space.away)
        moved = [i for i in values if space.storages.size[i]]
        candidate, count = plan, 0
        if plan.peak > budget:
            candidate, count = measure(space, plan.residuals, moved, price), len(moved)
            least = min(least, candidate.peak)
        low = 0
        while candidate.peak <= budget and low + 1 < count:
            middle = (low + count) // 2
            other = measure(space, plan.residuals, moved[:middle], price)
            if other.peak <= budget:
                candidate, count = other, middle
            else:
                low = middle
        if candidate.peak <= budget and (best is None or candidate.costs < best.costs):
            best = candidate
    if best is None:
        raise _infeasible(budget, least, plans.most)
    return best


def _infeasible(budget: int, least: int, most: int) -> BudgetError:
    return BudgetError(
        f"a memory budget of {budget} bytes can't be met: the least feasible peak is {least} bytes{_rounded(least)}, "
        f"and saving everything takes {most}{_rounded(most)}. "
        "Ask for at least the least, or for a fraction from 0.0 to 1.0 of the way between the two."
    )


def _rounded(count: int) -> str:
    return f" ({in_bytes(count)})" if count >= 1 << 10 else ""


# -------------------------------------------------------------------- pareto
# The budget/time curve of a function: its undominated plans, from saving everything to the least peak.


_MOST_ROWS = 24  # of the printed table


@dataclasses.dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A plan. `budget`: the peak, the smallest budget that the plan keeps to; `saved_bytes`: bytes kept for the
    backward; `cost`, `flops`: of its recomputation; `overhead`: the cost over the step's work.
    """

    budget: int
    saved_bytes: int
    cost: int
    flops: int
    overhead: float


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Pareto:
    """The curve, from the largest peak to the least. `str()` gives a table; rich prints a table too."""

    name: str
    points: tuple[ParetoPoint, ...]

    def data(self) -> dict[str, list[float]]:
        """The curve for a plot: a list for each of the point's fields."""
        return {
            field.name: [getattr(point, field.name) for point in self.points]
            for field in dataclasses.fields(ParetoPoint)
        }

    def table(self) -> Table:
        """Some points, evenly spread over budgets."""
        chosen = _spread(self.points, _MOST_ROWS)
        rows = [
            [in_bytes(p.budget), in_bytes(p.saved_bytes), f"{p.overhead:.1%}", f"{amount(p.flops)}FLOP"] for p in chosen
        ]
        title = f"memory budgets of {self.name}"
        columns = ("budget", "saved", "more work", "again")
        return Table(title, columns, rows, len(self.points) - len(chosen), right=4)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> Any:
        return self.table().rich()


def pareto_of(plans: Frontier, name: str) -> Pareto:
    """The curve of the plans."""
    nodes, cost = plans.index.nodes, plans.space.cost
    work = sum(cost) or 1
    return Pareto(
        name,
        tuple(
            ParetoPoint(
                plan.peak,
                plan.liveness.saved_bytes,
                plan.costs,
                sum(flops(nodes[i]) for i in plan.again),
                plan.costs / work,
            )
            for plan in plans.plans
        ),
    )


def _spread(points: tuple[ParetoPoint, ...], count: int) -> list[ParetoPoint]:
    if len(points) <= count:
        return list(points)
    first, last = points[0].budget, points[-1].budget
    budgets = [first - (first - last) * k / (count - 1) for k in range(count)]
    chosen = {min(range(len(points)), key=lambda i: abs(points[i].budget - budget)) for budget in budgets}
    return [points[i] for i in sorted(chosen)]


def can_replay(index: JointIndex) -> frozenset[int]:
    """The random operators of the forward that may run again: all that draw from their device's own generator."""
    return frozenset(
        i
        for i in index.once
        if index.kinds[i] is Kind.RANDOM
        and index.in_forward[i]
        and is_operator(index.nodes[i].target)
        and index.nodes[i].kwargs.get("generator") is None
        and not any(isinstance(argument, torch.Generator) for argument in index.nodes[i].args)
        and (device := device_of(index, i)) is not None
        and device.type in _DEVICES
        and index.bytes_of(i) > _WORTH * state_size(device)
    )
