"""The report: one HTML file with its data, style and script inside: it needs no network."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from foregrad.partitioners import amount, in_bytes, seconds

from .advice import groups
from .text import by_modules
from .tree import Findings, Memory, Operator, SavedTensor

_FOLDER = pathlib.Path(__file__).parent / "page"
_ROLES = ("operator", "saved", "again", "view", "input", "tangent")


def page(findings: Findings) -> str:
    """The whole file as text."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html").render(
        found=findings,
        cards=list(_cards(findings)),
        chart=Markup(chart(findings.memory)) if findings.memory is not None else "",  # noqa: S704 - names in it are escaped
        families=list(enumerate(FAMILIES)),
        style=Markup((_FOLDER / "report.css").read_text(encoding="utf-8")),  # noqa: S704
        script=Markup((_FOLDER / "report.js").read_text(encoding="utf-8")),  # noqa: S704
        data=Markup(_script_safe(_data(findings))),  # noqa: S704
    )


def _script_safe(data: Any) -> str:
    """JSON that can't end the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _cards(findings: Findings) -> Iterator[tuple[str, str, str]]:
    """The figures on top: name, figure, standard of comparison."""
    memory, work, time = findings.memory, findings.work, findings.time
    if memory is not None:
        yield "peak of memory", in_bytes(memory.predicted_peak), _compared(memory.measured_peak, memory.eager_peak)
        if findings.program is None or findings.program.has_backward:
            saved = _compared(memory.measured_saved, memory.eager_saved)
            yield "saved for the backward", in_bytes(memory.predicted_saved), saved
    if time is not None:
        ratio = f"{time.eager_s / time.compiled_s:.2f} times as fast as eager" if time.compiled_s else "not compared"
        yield "a step", seconds(time.compiled_s), f"eager {seconds(time.eager_s)}: {ratio}"
        yield "to compile", seconds(time.compile_s), f"worth {_steps(findings)}"
    if work is not None:
        again = f", {amount(work.again_flops)}FLOP run twice" if work.again_flops else ""
        yield "operations", f"{amount(work.flops)}FLOP", f"{in_bytes(work.moved)} moved{again}"
        both = f"{work.forward_operators} forward, {work.backward_operators} backward"
        yield "operators", str(work.forward_operators + work.backward_operators), both


def _compared(measured: int | None, eager: int | None) -> str:
    if measured is None:
        return "foreseen, not measured"
    return f"measured {in_bytes(measured)}" + (f", eager {in_bytes(eager)}" if eager is not None else "")


def _steps(findings: Findings) -> str:
    assert findings.time is not None
    steps = findings.time.compile_s / findings.time.eager_s if findings.time.eager_s else 0
    return f"{steps:,.0f} eager steps"


def _data(findings: Findings) -> dict[str, Any]:
    number = {one.key: at for at, one in enumerate(findings.operators)}
    return {
        "ops": _columns(findings.operators, number),
        "modules": findings.modules,
        "lines": findings.lines,
        "roles": _ROLES,
        "sources": [
            {"title": source.title, "lines": source.lines, "ops": [number.get(key, -1) for key in source.keys]}
            for source in findings.sources
        ],
        "tables": [table for table in _tables(findings, number) if table["rows"]],
    }


def _columns(operators: Sequence[Operator], number: dict[str, int]) -> dict[str, list[Any]]:
    get: dict[str, Callable[[Operator], Any]] = {
        "name": lambda one: one.key[2:],
        "half": lambda one: int(one.half == "backward"),
        "op": lambda one: one.op,
        "role": lambda one: _ROLES.index(one.role),
        "family": lambda one: FAMILIES.index(family(one.op)),
        "module": lambda one: one.module,
        "line": lambda one: one.line,
        "type": lambda one: one.type,
        "bytes": lambda one: one.nbytes,
        "flops": lambda one: one.flops,
        "moved": lambda one: one.moved,
        "alive": lambda one: one.alive,
        "seq": lambda one: one.sequence,
        "reads": lambda one: [number[key] for key in one.reads if key in number],
    }
    return {name: [read(one) for one in operators] for name, read in get.items()}


def _tables(findings: Findings, number: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Tables: columns (title, kind), rows, and for each row the operator that it is about. Kinds: "text", "bytes",
    "flops", "count", "share", "seconds".
    """
    memory, program = findings.memory, findings.program
    if memory is not None:
        saved = sorted(memory.saved, key=lambda one: (one.kind != "saved", -one.nbytes))
        yield _table(
            "Saved",
            "Values that the forward keeps for the backward, and why.",
            [("value", "text"), ("bytes", "bytes"), ("why", "text"), ("kind", "text"), ("operator", "text"),
             ("type", "text"), ("module", "text"), ("line", "text"), ("in the graph", "text")],
            [[s.label, s.nbytes, s.why, s.kind, s.op, s.type, s.module, s.line, s.name] for s in saved],
            [number.get(f"f:{s.name}", -1) for s in saved],
        )  # fmt: skip
        total = memory.predicted_saved or 1
        grouped = groups(memory.saved)
        yield _table(
            "By line",
            "Saved values by the line that makes them.",
            [("line", "text"), ("bytes", "bytes"), ("share", "share"), ("values", "count"), ("what", "text"),
             ("modules", "text")],
            [[g.place, g.nbytes, g.nbytes / total, g.count, g.what, ", ".join(g.modules)] for g in grouped],
        )  # fmt: skip
        yield _table(
            "By module",
            (
                "The cost of modules, inner modules included; layers that repeat share a row. The time is of an "
                "eager forward."
            ),
            [("module", "text"), ("bytes kept", "bytes"), ("FLOP", "flops"), ("eager forward", "seconds"),
             ("class", "text")],
            [[one.where, one.kept, one.flops, one.seconds, one.cls] for one in by_modules(findings)],
        )  # fmt: skip
        spent = sum(seconds for _, _, seconds in findings.operator_seconds) or 1
        yield _table(
            "By operator",
            "The time of each operator in an eager step, forward and backward.",
            [("operator", "text"), ("calls", "count"), ("time", "seconds"), ("share", "share")],
            [[op, calls, seconds, seconds / spent] for op, calls, seconds in findings.operator_seconds],
        )
        yield _table(
            "Run twice",
            "Operators of the forward that the backward runs once more.",
            [("value", "text"), ("of the work", "share"), ("FLOP", "flops"), ("operator", "text"), ("module", "text"),
             ("line", "text")],
            [[a.name, a.cost, a.flops, a.op, a.module, a.line] for a in memory.again],
            [number.get(f"b:{a.name}", -1) for a in memory.again],
        )  # fmt: skip
    if findings.operators:
        operators = [one for one in findings.operators if one.role not in ("input", "tangent")]
        yield _table(
            "Operators",
            "Every operator in the order they run; `alive` is the memory while it does.",
            [("value", "text"), ("half", "text"), ("operator", "text"), ("type", "text"), ("bytes", "bytes"),
             ("FLOP", "flops"), ("moved", "bytes"), ("alive", "bytes"), ("module", "text"), ("line", "text")],
            [[o.key[2:], o.half, o.op, o.type, o.nbytes, o.flops, o.moved, o.alive, findings.modules[o.module][0],
              findings.lines[o.line]] for o in operators],
            [number[o.key] for o in operators],
        )  # fmt: skip
    if findings.eager:
        yield _table(
            "Runs eagerly",
            "The parts that do not compile, their cost, and their remedies.",
            [("part", "text"), ("a call", "seconds"), ("calls", "count"), ("why", "text"), ("change", "text"),
             ("line", "text")],
            [[e.name, e.seconds, e.calls, e.reason, e.change, e.line] for e in findings.eager],
        )  # fmt: skip
    if program is not None:
        places = [*program.inputs, *program.outputs, *program.outside]
        columns = [("name", "text"), ("kind", "text"), ("type", "text"), ("bytes", "bytes"), ("note", "text")]
        title = "Arguments, results, and tensors that the function reaches by itself."
        yield _table("Inputs", title, columns, [[p.name, p.kind, p.type, p.nbytes, p.note] for p in places])
        facts = [*program.mutated, *program.aliased]
        columns = [("what", "text"), ("how", "text")]
        yield _table("Effects", "Writes of a call, and results that share memory.", columns,
                     [[fact.name, fact.what] for fact in facts])  # fmt: skip
        columns = [("what", "text"), ("expected", "text"), ("kind", "text")]
        yield _table("Guards", "The checks of each call.", columns,
                     [[g.name, g.expected, g.kind] for g in program.guards])  # fmt: skip
    yield _table("Compilations", "Compilations so far, and why.", [("compilation", "text")],
                 [[line] for line in findings.compilations])  # fmt: skip


def _table(
    title: str,
    about: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[Any]],
    ops: Sequence[int] | None = None,
) -> dict[str, Any]:
    return {"title": title, "about": about, "columns": columns, "rows": rows, "ops": ops}


# -------------------------------------------------------------------- the chart
# Memory over a step as inline SVG: each saved value a layer, from where it is made to where it is read last.
#
# Layers lie in the order in which they are made, and the backward mostly reads the first values last: so these are the
# lowest, and a layer stays at one height. Further live memory (gradients, results, temporary values) lies on top.


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 1200, 400, 72, 34, 26, 12
_FEW = 90  # outlines are drawn for this many layers at most

FAMILIES = ("products", "attention", "norms", "elementwise", "random", "copies", "other")
_WORDS = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "mkldnn_rnn_layer", "einsum"),
    "attention": ("softmax", "_softmax", "_safe_softmax", "_log_softmax", "scaled_dot_product"),
    "norms": ("norm", "batch_norm", "layer_norm", "rsqrt", "var_mean"),
    "random": ("bernoulli", "dropout", "rand", "normal"),
    "copies": ("view", "_unsafe_view", "clone", "_to_copy", "cat", "permute", "transpose", "t", "expand", "embedding"),
}


def family(op: str) -> str:
    """A coarse kind of an operator, for colours."""
    name = op.partition(".")[2].partition(".")[0] or op
    if name == "getitem":
        return "norms"
    for kind, words in _WORDS.items():
        if name in words or any(len(word) > 4 and word in name for word in words):
            return kind
    return "elementwise" if op.startswith(("aten.", "prims.")) else "other"


@dataclasses.dataclass(frozen=True, slots=True)
class _Axes:
    """Steps and bytes as points of the picture."""

    steps: int
    most: int

    def x(self, step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, self.steps), 1)

    def y(self, count: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * count / max(1, self.most), 1)


def chart(memory: Memory) -> str:
    """The picture; each layer has its value's key in `data-key`."""
    if not memory.alive:
        return ""
    axes = _Axes(len(memory.alive), max(memory.alive) or 1)
    outlined = "few" if sum(one.nbytes > 0 for one in memory.saved) <= _FEW else "many"
    about = "Memory over the step. Arrow keys go from saved value to saved value, Enter selects one."
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    parts = [
        f'<svg id="chart" class="{outlined}" {size} role="img" tabindex="0" aria-label="{about}">',
        *_grid(axes),
        f'<path class="rest" d="{_outline(memory.alive, axes)}"/>',
        *_layers(memory.saved, axes),
        *_marks(memory, axes),
        "</svg>",
    ]
    return "".join(parts)


def _grid(axes: _Axes) -> list[str]:
    lines = []
    for count in _ticks(axes.most):
        y = axes.y(count)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{in_bytes(count)}</text>')
    return lines


def _ticks(most: int) -> list[int]:
    """About four round numbers of bytes."""
    unit = 1 << (10 * int(math.log(max(most, 1), 1024)))
    rough = most / unit / 4
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough) * unit
    return [round(step * k) for k in range(int(most // step) + 1)]


def _outline(alive: Sequence[int], axes: _Axes) -> str:
    points = [f"M{axes.x(0)} {axes.y(0)}"]
    before = None
    for step, count in enumerate(alive):
        if count != before:
            points.append(f"H{axes.x(step)}V{axes.y(count)}")
        before = count
    return "".join([*points, f"H{axes.x(len(alive))}V{axes.y(0)}Z"])


def _layers(saved: Sequence[SavedTensor], axes: _Axes) -> list[str]:
    layers = sorted((s for s in saved if s.kind == "saved" and s.nbytes), key=lambda s: (s.born, -s.dies))
    times = sorted({0, axes.steps} | {s.born for s in layers} | {s.dies + 1 for s in layers})
    spans: list[list[tuple[int, int, int]]] = [[] for _ in layers]  # of each: (from, to, height of its floor)
    for start, end in itertools.pairwise(times):
        floor = 0
        for number, one in enumerate(layers):
            if one.born <= start and end <= one.dies + 1:
                mine = spans[number]
                if mine and mine[-1][2] == floor and mine[-1][1] == start:
                    mine[-1] = (mine[-1][0], end, floor)
                else:
                    mine.append((start, end, floor))
                floor += one.nbytes
    pairs = enumerate(zip(layers, spans, strict=True))
    return [_layer(number, one, span, axes) for number, (one, span) in pairs if span]


def _layer(number: int, one: SavedTensor, span: list[tuple[int, int, int]], axes: _Axes) -> str:
    path = "".join(
        f"M{axes.x(start)} {axes.y(floor)}V{axes.y(floor + one.nbytes)}H{axes.x(end)}V{axes.y(floor)}Z"
        for start, end, floor in span
    )
    kind = f"c{FAMILIES.index(family(one.op))}{' odd' if number % 2 else ''}"
    label = escape(f"{one.label}, {in_bytes(one.nbytes)}. {one.line}", quote=False)
    return f'<path class="layer {kind}" data-key="f:{escape(one.name)}" d="{path}"><title>{label}</title></path>'


def _marks(memory: Memory, axes: _Axes) -> list[str]:
    middle, peak = axes.x(memory.forward_steps), max(memory.alive)
    at = axes.x(memory.alive.index(peak) + 0.5)
    anchor = "end" if at > _WIDTH / 2 else "start"
    shift = -8 if anchor == "end" else 8
    said = f"peak {in_bytes(peak)} at {escape(memory.peak_at.partition(',')[0])}"
    place = f'x="{at + shift}" y="{axes.y(peak) - 10}" text-anchor="{anchor}"'
    marks = [
        f'<text class="tick" x="{axes.x(0) + 6}" y="{_HEIGHT - 8}">forward</text>',
        f'<circle class="peak" cx="{at}" cy="{axes.y(peak)}" r="4"/>',
        f'<text class="peaktext" {place}>{said}</text>',
    ]
    if memory.forward_steps < len(memory.alive):
        marks.append(f'<line class="middle" x1="{middle}" x2="{middle}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        marks.append(f'<text class="tick" x="{middle + 6}" y="{_HEIGHT - 8}">backward</text>')
    return marks
