"""`Explanation`: the findings of `foregrad.explain`: printed as a report, saved as a page.

Text, tables of rich and HTML for notebooks are made from one list of sections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from foregrad.partitioners import Table, amount, in_bytes, seconds

from .advice import groups
from .tree import Findings, SavedTensor

_MOST_ROWS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A title, lines of text and tables."""

    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()


def _measured(count: int | None) -> str:
    return "-" if count is None else in_bytes(count)


def figures(findings: Findings) -> Table:
    """The costs of a step: foreseen, measured, and in eager mode."""
    memory, work, time = findings.memory, findings.work, findings.time
    rows = []
    if memory is not None:
        rows += [
            ["peak of memory", in_bytes(memory.predicted_peak), _measured(memory.measured_peak),
             _measured(memory.eager_peak)],
            ["saved for the backward", in_bytes(memory.predicted_saved), _measured(memory.measured_saved),
             _measured(memory.eager_saved)],
        ]  # fmt: skip
    if time is not None:
        rows.append(["time of a step", "", seconds(time.compiled_s), seconds(time.eager_s)])
    if work is not None:
        rows.append(["operations", f"{amount(work.flops)}FLOP", "", f"{amount(work.flops - work.again_flops)}FLOP"])
        rows.append(["bytes moved", in_bytes(work.moved), "", ""])
    return Table("cost of a step", ("", "foreseen", "measured", "eager"), rows, right=0)


def sections(findings: Findings) -> Iterator[Section]:
    """The explanation, most important first."""
    head = f"backend {findings.backend}, partition {findings.partition}"
    if findings.program is not None and findings.work is not None:
        kind = "forward and backward" if findings.program.has_backward else "forward alone"
        operators = findings.work.forward_operators + findings.work.backward_operators
        head += f"; captured as one graph, {kind}, of {operators} operators"
    elif findings.eager:
        head += "; it runs eagerly"
    lines = [head]
    if findings.not_measured:
        lines.append(f"nothing was measured: {findings.not_measured}")
    if findings.time is not None:
        lines.append(f"compiled in {seconds(findings.time.compile_s)}")
    table = figures(findings)
    yield Section(findings.name, tuple(lines), (table,) if table.rows else ())
    if findings.advice:
        yield Section("advice", tuple(f"- {one.text}" for one in findings.advice))
    if findings.eager:
        yield Section("what runs eagerly", tuple(_eager(findings)))
    by_module = list(by_modules(findings))
    if len(by_module) > 1:
        rows = [
            [in_bytes(one.kept), f"{amount(one.flops)}FLOP", took, one.where, one.cls]
            for one in by_module
            for took in ["not measured" if one.seconds is None else seconds(one.seconds)]
        ]
        columns = ("kept", "operations", "eager forward", "module", "class")
        yield Section("modules", tables=(_cut("a row includes the modules inside", columns, rows, right=3),))
    if findings.operator_seconds:
        whole = sum(spent for _, _, spent in findings.operator_seconds) or 1
        rows = [
            [seconds(spent), f"{spent / whole:.0%}", str(calls), op] for op, calls, spent in findings.operator_seconds
        ]
        yield Section(
            "operators", tables=(_cut("an eager step", ("time", "share", "calls", "operator"), rows, right=3),)
        )
    if findings.compilations:
        yield Section("compilations", findings.compilations)
    yield from _memory(findings)
    yield from _program(findings)


@dataclasses.dataclass(slots=True)
class ModuleCost:
    """Modules that differ in a number of their path, and their costs, with all inside: `kept` bytes for the backward,
    operations of forward and backward, and `seconds` of the eager forward (None: not measured).
    """

    where: str
    cls: str
    kept: int = 0
    flops: int = 0
    seconds: float | None = None


def by_modules(findings: Findings) -> Iterator[ModuleCost]:
    """The modules of a model, the outer ones first; layers that repeat are one."""
    kinds = dict(findings.modules)
    paths: dict[str, list[str]] = {}
    for path in sorted((path for path in kinds if path), key=lambda path: path.count(".")):
        paths.setdefault(of_layers(path), []).append(path)
    timed = dict(findings.module_seconds)
    for alike in paths.values():
        cost = ModuleCost(alike[0] if len(alike) == 1 else f"{alike[0]} to {alike[-1]}", kinds[alike[0]])
        inside = tuple(f"{path}." for path in alike)
        own = [f"{path}.".startswith(inside) for path, _ in findings.modules]
        cost.flops = sum(one.flops for one in findings.operators if own[one.module])
        saved = findings.memory.saved if findings.memory is not None else ()
        cost.kept = sum(s.nbytes for s in saved if s.kind == "saved" and f"{s.module}.".startswith(inside))
        if all(path in timed for path in alike):
            cost.seconds = sum(timed[path] for path in alike)
        yield cost


def _eager(findings: Findings) -> Iterator[str]:
    for one in findings.eager:
        cost = f" ({seconds(one.seconds)} a call)" if one.seconds is not None else ""
        yield f"- {one.name}{cost}: {one.reason}"
        if one.line and one.line.partition(" in ")[0] not in one.reason:
            yield f"  at {one.line}"
        if one.change:
            yield f"  to compile it: {one.change}"


def _memory(findings: Findings) -> Iterator[Section]:
    memory = findings.memory
    if memory is None or not memory.saved:
        return
    total = memory.predicted_saved or 1
    rows = [
        [in_bytes(g.nbytes), f"{g.nbytes / total:.0%}", str(g.count), g.what, g.first_and_last, g.place]
        for g in groups(memory.saved)
    ]
    columns = ("bytes", "share", "values", "what", "modules", "line")
    tables = [_cut("by line", columns, rows, right=3)]
    kept = sorted((one for one in memory.saved if one.kind == "saved" and one.nbytes), key=lambda one: -one.nbytes)
    alike: dict[tuple[str, str], list[SavedTensor]] = {}
    for one in kept:
        alike.setdefault((of_layers(one.label), one.type), []).append(one)
    largest = sorted(alike.values(), key=lambda members: -sum(one.nbytes for one in members))
    rows = [
        [in_bytes(sum(one.nbytes for one in of)), str(len(of)), _of_all(of), of[0].why, of[0].type] for of in largest
    ]
    tables.append(_cut("largest", ("bytes", "values", "value", "why", "type"), rows, right=2))
    if again := sorted((one for one in memory.again if one.cost or one.flops), key=lambda one: -one.cost):
        rows = [[f"{one.cost:.2%}", f"{amount(one.flops)}FLOP", one.name, one.op, one.line] for one in again]
        tables.append(_cut("runs twice", ("of the work", "FLOP", "value", "operator", "line"), rows, right=2))
    yield Section("saved for the backward", (f"peak at {memory.peak_at}",), tuple(tables))


def of_layers(path: str) -> str:
    """A path in a model, or a text with a path, without the number of the layer: the first of its numbers."""
    return _NUMBER.sub("*", path, count=1)


_NUMBER = re.compile(r"(?<![^.\s])\d+(?![^.\s])")


def _of_all(alike: Sequence[SavedTensor]) -> str:
    """Values that differ in the numbers of their modules, by the first and the last number."""
    first, last = (one.label.split() for one in sorted((alike[0], alike[-1]), key=lambda one: one.born))
    return " ".join(one if one == other else f"{one} to {other}" for one, other in zip(first, last, strict=True))


_GUARDED = {"setting": "settings", "read": "values that the function read", "memory": "shared memory"}


def _program(findings: Findings) -> Iterator[Section]:
    program = findings.program
    if program is None:
        return
    places = (*program.inputs, *program.outputs)
    rows = [[one.name, one.kind, one.type, one.note] for one in places]
    outside: dict[str, list[int]] = {}
    for one in program.outside:
        outside.setdefault(one.kind, []).append(one.nbytes)
    lines = [f"{len(of)} {kind}{'s' if len(of) > 1 else ''}: {in_bytes(sum(of))}" for kind, of in outside.items()]
    tables = [_cut("arguments and results", ("name", "kind", "type", ""), rows, right=0)]
    if program.mutated:
        tables.append(_cut("written", ("what", "how"), [[one.name, one.what] for one in program.mutated], right=0))
    if program.aliased:
        tables.append(_cut("shared", ("result", "what it is"), [[o.name, o.what] for o in program.aliased], right=0))
    kinds: dict[str, int] = {}
    for guard in program.guards:
        kinds[guard.kind] = kinds.get(guard.kind, 0) + 1
    guarded = ", ".join(f"{count} on {_GUARDED.get(kind, f'{kind}s')}" for kind, count in kinds.items())
    yield Section("the program", (*lines, f"guards: {guarded}"), tuple(tables))


def _cut(title: str, columns: tuple[str, ...], rows: list[list[str]], *, right: int) -> Table:
    kept = [at for at in range(len(columns)) if any(row[at] for row in rows)]  # a column of empty cells says nothing
    rows = [[row[at] for at in kept] for row in rows]
    return Table(title, [columns[at] for at in kept], rows[:_MOST_ROWS], len(rows) - _MOST_ROWS, right=right)


def text(findings: Findings) -> str:
    """Plain text."""
    parts = []
    for section in sections(findings):
        tables = [str(table).lstrip("\n") for table in section.tables if table.rows]
        parts.append("\n".join([section.title, "=" * len(section.title), *section.lines, *tables]))
    return "\n\n".join(parts)


def print_report(findings: Findings) -> None:
    """With rich on a terminal, where it is installed."""
    console: Any = None
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            console = Console(highlight=False)
    if console is None:
        print(text(findings))
    else:
        console.print(rich(findings))


def rich(findings: Findings) -> Any:
    """Panels and tables for rich."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for section in sections(findings):
        parts.append(Text(f"\n{section.title}", style="bold"))
        parts += [Text(line) for line in section.lines]
        parts += [table.rich() for table in section.tables if table.rows]
    return Group(*parts)


def notebook(findings: Findings) -> str:
    """HTML for a notebook's cell: the report in a frame of its own, or tables where jinja2 is not installed."""
    with contextlib.suppress(ImportError):
        from .html import page

        frame = 'style="width:100%;height:760px;border:1px solid #8884" title="report of foregrad.explain"'
        return f'<iframe {frame} srcdoc="{html.escape(page(findings))}"></iframe>'
    parts = []
    for section in sections(findings):
        parts.append(f"<h4>{html.escape(section.title)}</h4>")
        parts += [f"<div>{html.escape(line)}</div>" for line in section.lines]
        parts += [table._repr_html_() for table in section.tables if table.rows]
    return f'<div class="foregrad">{"".join(parts)}</div>'


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Explanation(Findings):
    """The findings of `foregrad.explain`: how a function was compiled, and the costs of a call.

    Printed, it is a report in plain text; `show()`, rich and notebooks make tables of it. `not_measured`: why nothing
    was run, or "". `modules`: the (path, class) of each module that ran, by the numbers in `operators`; `lines`: the
    user's lines.

    Example:
        >>> import torch, foregrad
        >>> found = foregrad.explain(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True), backend="eager")
        >>> [(one.name, one.kind, one.nbytes) for one in found.memory.saved]
        [('primals_1', 'input', 12)]
    """

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the report as one self-contained HTML file; gives its path.

        Example:
            >>> import torch, foregrad
            >>> found = foregrad.explain(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True), backend="eager")
            >>> found.save("report.html").name
            'report.html'
        """
        from .html import page  # late: jinja2 is needed for this alone

        target = pathlib.Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target

    def to_json(self, *, indent: int | None = None) -> str:
        """All findings as JSON: an object with the fields of the class."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def show(self) -> None:
        """Print the report: as tables on a terminal where rich is installed, else as plain text."""
        print_report(self)

    def __repr__(self) -> str:
        return text(self)

    def __rich__(self) -> Any:
        return rich(self)

    def _repr_html_(self) -> str:
        return notebook(self)
