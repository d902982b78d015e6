"""A plan as one HTML file without scripts: figures, the choices, memory over the step, the tables."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..partitioners import Table, amount, in_bytes, seconds
from .memory import StepMemory
from .text import heading, tables

if TYPE_CHECKING:
    from .result import Plan

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1200, 320, 80, 24, 28
_POINTS = 1200  # of a line: of several operators at one point the largest is drawn


def page(plan: Plan) -> str:
    """The whole file as text."""
    style = (pathlib.Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    name = escape(plan.name)
    body = "".join(
        [
            f"<h1>Plan of {name}</h1>",
            *(f"<p>{escape(line)}</p>" for line in heading(plan)),
            "<dl>",
            *(f'<div><dt>{t}</dt><dd>{v}</dd><dd class="more">{escape(m)}</dd></div>' for t, v, m in _cards(plan)),
            "</dl>",
            *_charts(plan),
            *(_table(plan, table) for table in tables(plan)),
        ]
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{name}</title><style>{style}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _cards(plan: Plan) -> Iterator[tuple[str, str, str]]:
    best = plan.best
    if best is not None and best.memory is not None:
        of = "" if plan.budget is None else f" of {in_bytes(plan.budget)}"
        yield "peak of a rank", in_bytes(best.memory.peak) + of, f"by {best.name!r}"
        yield "a step", seconds(best.seconds), f"foreseen for {plan.device.name}"
    else:
        yield "fits", "no choice", f"in {in_bytes(plan.budget or 0)}"
    yield "parameters", amount(plan.trained), in_bytes(plan.standing.parameters)
    yield "optimizer's state", in_bytes(plan.standing.optimizer), plan.optimizer.name
    yield "operations", f"{amount(plan.total.flops)}FLOP", f"{in_bytes(plan.total.moved)} moved"


def _charts(plan: Plan) -> Iterator[str]:
    most = max((one.memory.peak for one in plan.choices if one.memory is not None), default=1)
    top = max(most, plan.budget if plan.budget is not None and plan.budget < 2 * most else 0)
    yield '<p><span class="key stand"></span>allocated before the step <span class="key alive"></span>by the step</p>'
    for one in plan.choices:
        if one.memory is None:
            continue
        mark = '<span class="yes">fits</span>' if one.fits(plan.budget) else '<span class="no">does not fit</span>'
        mark = "" if plan.budget is None else mark
        where = f"peak {in_bytes(one.memory.peak)} at {one.memory.peak_at}"
        yield f"<h2>{escape(one.name)} {mark}</h2><p>{escape(where)}; a step {seconds(one.seconds)}</p>"
        yield f'<div class="wide">{_chart(plan, one.memory, top)}</div>'


def _chart(plan: Plan, memory: StepMemory, top: int) -> str:
    """Bytes over the step: constant bytes below, temporary bytes above."""
    points, stand = _thinned(memory.alive), plan.standing.total

    def y(count: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * count / max(1, top), 1)

    def x(step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * step / max(1, len(points)), 1)

    line = "".join(f"H{x(at)}V{y(count)}" for at, count in enumerate(points))
    half = x(memory.forward_steps * len(points) / max(1, len(memory.alive)))
    base = y(0)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Memory over the step">',
        f'<path class="alive" d="M{_LEFT} {base}{line}H{_WIDTH}V{base}Z"/>',
        f'<path class="stand" d="M{_LEFT} {base}V{y(stand)}H{_WIDTH}V{base}Z"/>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        height, text = y(top * share), in_bytes(int(top * share))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{height}" y2="{height}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{height + 4}" text-anchor="end">{text}</text>')
    if plan.budget is not None and plan.budget <= top:
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(plan.budget)}" y2="{y(plan.budget)}"/>')
    at = points.index(max(points))
    parts.append(f'<circle class="mark" cx="{x(at + 0.5)}" cy="{y(points[at])}" r="4"/>')
    parts.append(f'<line class="grid" x1="{half}" x2="{half}" y1="{_TOP}" y2="{base}"/>')
    names = ((_LEFT + 6, "forward", "start"), (half + 6, "backward", "start"), (_WIDTH - 4, "optimizer", "end"))
    for place, text, anchor in names:
        parts.append(f'<text x="{place}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{text}</text>')
    parts.append("</svg>")
    return "".join(parts)


def _thinned(alive: Sequence[int]) -> list[int]:
    if len(alive) <= _POINTS:
        return list(alive)
    ends = [k * len(alive) // _POINTS for k in range(_POINTS + 1)]
    return [max(alive[start:stop]) for start, stop in itertools.pairwise(ends)]


def _table(plan: Plan, table: Table) -> str:
    best = plan.best.name if plan.best is not None else None

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{'' if at < table.right else ' class=text'}>{escape(cell)}</{tag}>" for at, cell in enumerate(row)
        )

    rows = [f"<tr{' class=best' if row[-1] == best else ''}>{cells('td', row)}</tr>" for row in table.rows]
    more = f"<p>and {table.left_out} more</p>" if table.left_out > 0 else ""
    head = f"<tr>{cells('th', table.columns)}</tr>"
    return f'<h2>{escape(table.title)}</h2><div class="wide"><table>{head}{"".join(rows)}</table></div>{more}'
