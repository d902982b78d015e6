"""A plan as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..partitioners import Table, amount, in_bytes, seconds
from .choices import Choice

if TYPE_CHECKING:
    from .result import Plan

_MOST = 8  # rows of a printed table


def heading(plan: Plan) -> list[str]:
    """The plan's subject, device and assumptions."""
    device, ranks = plan.device, plan.ranks
    has = f", {in_bytes(device.memory)}" if device.memory else ""
    shares = device.shares
    optimizer = "no optimizer" if plan.optimizer.name == "none" else plan.optimizer.name
    assumed = (
        f"assumed, as shares of the maker's figures: {shares.flops:.0%} of the operations, {shares.bandwidth:.0%} of "
        f"the bandwidth, {shares.link:.0%} of the links; and one kernel for each operator"
    )
    lines = [
        f"{plan.trained:,} trained parameters, {optimizer}, on {ranks} of {device.name}{has}",
        f"a step: {amount(plan.total.flops)}FLOP, {in_bytes(plan.total.moved)} moved, if nothing is computed twice",
        assumed,
    ]
    if plan.budget is not None and plan.budget != device.memory:
        lines.append(f"budget {in_bytes(plan.budget)}")
    return lines


def choices_table(plan: Plan) -> Table:
    """The choices beside one another."""
    columns = ("peak", "fits", "saved", "to host", "again", "step", "choice")
    table = [columns, *(_row(plan, one) for one in plan.choices)]
    if plan.budget is None:  # nothing to fit into
        table = [(row[0], *row[2:]) for row in table]
    return Table("choices", table[0], table[1:], right=len(table[0]) - 1)


def _row(plan: Plan, one: Choice) -> list[str]:
    if one.memory is None:
        return ["-", "no", "-", "-", "-", "-", f"{one.name}: {one.why_not}"]
    fits = "" if plan.budget is None else "yes" if one.memory.peak <= plan.budget else "no"
    again = one.again_flops / plan.total.flops if plan.total.flops else 0.0
    away = in_bytes(one.away) if one.away else ""
    cells = [in_bytes(one.memory.peak), fits, in_bytes(one.memory.saved), away, f"{again:.1%}", seconds(one.seconds)]
    return [*cells, one.name]


def tables(plan: Plan) -> list[Table]:
    """All tables, the most important first."""
    found = [choices_table(plan)]
    one = plan.best or min((c for c in plan.choices if c.memory is not None), key=lambda c: c.peak or 0)
    memory = one.memory
    assert memory is not None
    rows = [[in_bytes(count), name, ""] for name, count in plan.standing_rows()]
    rows += [[in_bytes(a.nbytes), a.kind, f"{a.module or 'outside of modules'} ({a.count})"] for a in memory.at_peak]
    title = f"alive at the peak of {one.name!r}, at {memory.peak_at}"
    found.append(Table(title, ("bytes", "what", "module (values)"), rows[: _MOST + 4], len(rows) - _MOST - 4, right=1))
    if plan.collectives:
        rows = [[in_bytes(c.nbytes), str(c.count), seconds(c.seconds), c.name] for c in plan.collectives]
        found.append(Table("collectives of a rank", ("sent", "count", "time", "what"), rows, right=3))
    work = [
        [f"{amount(t.flops)}FLOP", in_bytes(t.moved), seconds(t.seconds), path or "outside of modules"]
        for path, t in plan.modules.items()
    ]
    found.append(
        Table("work by module", ("operations", "moved", "time", "module"), work[:_MOST], len(work) - _MOST, right=3)
    )
    return found


def text(plan: Plan) -> str:
    """Plain text."""
    best, fitting = plan.best, "" if plan.budget is None else " that fits"
    fits = "no choice fits" if best is None else f"quickest{fitting}: {best.name!r}, {seconds(best.seconds)} a step"
    title = f"plan of {plan.name}"
    return "\n".join([title, "=" * len(title), *heading(plan), fits, *map(str, tables(plan))])
