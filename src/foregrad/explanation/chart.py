"""Memory over a step as inline SVG: each saved value a layer, from where it is made to where it is read last.

Layers lie in the order in which they are made, so that those made first, which the backward mostly reads last, are the
lowest: a layer then stays at one height. What is alive besides (gradients, results, temporary values) lies on top.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from html import escape

from ..partitioners.tables import in_bytes
from .tree import Memory, Saved

__all__ = ["FAMILIES", "chart", "family"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 1200, 400, 72, 34, 26, 12
_FEW = 90  # layers, up to which each has an outline

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


def _layers(saved: Sequence[Saved], axes: _Axes) -> list[str]:
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


def _layer(number: int, one: Saved, span: list[tuple[int, int, int]], axes: _Axes) -> str:
    path = "".join(
        f"M{axes.x(start)} {axes.y(floor)}V{axes.y(floor + one.nbytes)}H{axes.x(end)}V{axes.y(floor)}Z"
        for start, end, floor in span
    )
    kind = f"c{FAMILIES.index(family(one.op))}{' odd' if number % 2 else ''}"
    label = escape(f"{one.variable or one.name}, {in_bytes(one.nbytes)}. {one.line}", quote=False)
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
