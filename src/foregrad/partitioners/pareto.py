"""The budget/time curve of a function: its undominated plans, from saving everything to the least peak."""

from __future__ import annotations

import dataclasses
from typing import Any

from .budget import Frontier
from .costs import flops
from .tables import Table, amount, in_bytes

_MOST_ROWS = 24  # of the printed table


@dataclasses.dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A plan. `budget`: the peak, which is the smallest budget that the plan keeps to; `saved_bytes`: what it keeps for
    the backward; `cost`, `flops`: what it computes again; `overhead`: that cost over the step's work.
    """

    budget: int
    saved_bytes: int
    cost: int
    flops: int
    overhead: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pareto:
    """The curve, from the largest peak to the least. `str()` of it is a table; rich prints it as one."""

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

    def __rich__(self) -> Any:
        return self.table().rich()


def pareto_of(plans: Frontier, name: str) -> Pareto:
    """The curve of these plans."""
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
