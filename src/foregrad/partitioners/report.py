"""Reports on a split: each value that is saved, each that is computed again, the bytes alive over time.

A report reads the two halves alone, so it is about the code that runs, whichever partitioner made it.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import fx

from ..graph.joint import Partitioned
from ..graph.meta import TensorSpec, spec_of, value_of
from ..graph.printing import user_line
from ..locks import cached_property
from .classify import Kind
from .costs import analytic_cost, costs, flops
from .index import JointIndex
from .liveness import Storages, Timeline, is_offloaded, nbytes

# -------------------------------------------------------------------------------------------------------------- tables
# Tables of reports, as plain text or for rich; bytes and counts as people read them.


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table: the first `right` columns are numbers; `left_out` more rows are not shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0
    right: int = 1

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.columns))]
        text = [self.title]
        for line in lines:
            cells = [
                cell.rjust(width) if at < self.right else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  " + "  ".join(cells).rstrip())
        if self.left_out > 0:
            text.append(f"  and {self.left_out} more")
        return "\n".join(text)

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        sides = ["right" if at < self.right else "left" for at in range(len(self.columns))]
        body = "".join(
            f"<tr>{''.join(_cell(text, side) for text, side in zip(row, sides, strict=True))}</tr>" for row in self.rows
        )
        more = f"<div>and {self.left_out} more</div>" if self.left_out > 0 else ""
        title = f'<caption style="text-align:left">{html.escape(self.title)}</caption>' if self.title else ""
        return f"<table>{title}<tr>{head}</tr>{body}</table>{more}"

    def rich(self) -> Any:
        """The table as rich draws it."""
        from rich.table import Table as RichTable
        from rich.text import Text

        caption = f"and {self.left_out} more" if self.left_out > 0 else None
        table = RichTable(title=self.title, title_justify="left", caption=caption, caption_justify="left")
        for at, column in enumerate(self.columns):
            table.add_column(column, justify="right" if at < self.right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def _cell(text: str, side: str) -> str:
    return f'<td style="text-align:{side}">{html.escape(text)}</td>'


def in_bytes(count: int) -> str:
    """Bytes with a unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def amount(count: float) -> str:
    """A count with a prefix: 3.2 G."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {prefix}"
    return f"{count:.0f} "


def seconds(value: float) -> str:
    """A time with a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


_MOST_ROWS = 40  # of a printed table
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60  # of a printed timeline


@dataclasses.dataclass(frozen=True, slots=True)
class SavedValue:
    """A value that the forward keeps for the backward. `kind`: "saved", "output" (the caller has it),
    "input" (there before), "offloaded" (to host memory), "number". `span`: the operators, by their places in the
    report's `forward` and `backward`, that make its memory and that read it last.
    """

    name: str
    line: str | None
    spec: TensorSpec | None
    nbytes: int
    kind: str
    names: tuple[str, ...]  # the name given by `checkpoint_name`
    span: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputed:
    """An operator of the forward that the backward runs once more. `cost`: in the cost model's operations."""

    name: str
    op: str
    line: str | None
    flops: int
    cost: int


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The memory and time of a split. `str()` gives text; rich prints tables.

    `forward` and `backward`: for each operator in its order, its name and the bytes alive while it runs, beyond the
    bytes alive before the call. `work`: the cost of a step that computes nothing twice. `budget`: the outcome of the
    memory budget, with the proof for the plan.
    """

    name: str
    saved: tuple[SavedValue, ...]
    recomputed: tuple[Recomputed, ...]
    forward: tuple[tuple[str, int], ...]
    backward: tuple[tuple[str, int], ...]
    peak: int
    peak_at: str
    work: int
    budget: Any = None  # an `Outcome`, where there is a memory budget

    @property
    def saved_bytes(self) -> int:
        """Bytes that are kept for the backward and would be free without it."""
        return sum(value.nbytes for value in self.saved if value.kind == "saved")

    @property
    def cost(self) -> int:
        """The cost of recomputation, in the cost model's operations."""
        return sum(one.cost for one in self.recomputed)

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, convolutions and attentions computed again."""
        return sum(one.flops for one in self.recomputed)

    def summary(self) -> str:
        """The first lines of the text."""
        share = f" ({self.cost / self.work:.1%} of the step's work)" if self.work else ""
        budget = "" if self.budget is None else f"  budget {self.budget}\n"
        moved = sum(value.nbytes for value in self.saved if value.kind == "offloaded")
        away = f", {in_bytes(moved)} more in host memory" if moved else ""
        return (
            f"memory of {self.name}\n{budget}"
            f"  peak   {in_bytes(self.peak)} at {self.peak_at}\n"
            f"  saved  {in_bytes(self.saved_bytes)} in {sum(v.kind == 'saved' for v in self.saved)} values{away}\n"
            f"  again  {len(self.recomputed)} operators, {amount(self.flops)}FLOP{share}\n"
            f"  over time, forward | backward:\n  {self.bars()}"
        )

    def bars(self) -> str:
        """The bytes alive over time as a row of bars."""
        steps = len(self.forward) + len(self.backward)
        cells = max(1, round(_WIDTH * len(self.forward) / max(1, steps)))
        return f"{_bars(self.forward, cells, self.peak)}|{_bars(self.backward, _WIDTH - cells, self.peak)}"

    def tables(self) -> list[Table]:
        """The saved values, largest first, and the recomputed operators, dearest first."""
        kept = sorted(self.saved, key=lambda v: (v.kind != "saved", -v.nbytes))
        saved = [
            [in_bytes(v.nbytes), v.kind, v.name, str(v.spec or ""), ", ".join(v.names), v.line or ""] for v in kept
        ]
        dearest = sorted(self.recomputed, key=lambda r: -r.cost)
        again = [[amount(r.cost), amount(r.flops), r.name, r.op, r.line or ""] for r in dearest]
        return [
            Table("saved for the backward", ("bytes", "kind", "value", "type", "named", "line"), saved[:_MOST_ROWS],
                  len(saved) - _MOST_ROWS, right=1),
            Table("computed again in the backward", ("cost", "FLOP", "value", "operator", "line"), again[:_MOST_ROWS],
                  len(again) - _MOST_ROWS, right=2),
        ]  # fmt: skip

    def __str__(self) -> str:
        return "\n\n".join([self.summary(), *(str(table) for table in self.tables() if table.rows)])

    def __rich__(self) -> object:
        from rich.console import Group

        return Group(self.summary(), *(table.rich() for table in self.tables() if table.rows))


@dataclasses.dataclass(frozen=True, slots=True)
class Parts(Partitioned):
    """The halves of a joint graph, with a report on their memory and time."""

    def report(self) -> Report:
        """Each saved value with its line and bytes, the recomputation and its cost, the bytes alive over time."""
        return make_report(self)


def make_report(parts: Partitioned) -> Report:
    """The report of a split."""
    halves = halves_of(parts)
    forward, backward, saved, roots = halves.forward, halves.backward, parts.saved_nodes, halves.roots
    first, second = halves.timelines()
    peak = max(first.peak, first.after, second.peak, second.after)
    again = tuple(_recomputed(forward, backward))
    work = forward.work() + backward.work() - sum(one.cost for one in again)
    at = first if first.peak >= second.peak else second
    half = forward if at is first else backward
    place = "the end" if at.peak_node is None else half.describe(at.peak_node)
    return Report(
        parts.joint.name,
        tuple(_saved_values(forward, saved, roots, _spans(forward, backward, first, second))),
        again,
        forward.named(first),
        backward.named(second),
        peak,
        f"{place}, in the {'forward' if at is first else 'backward'}",
        work,
        getattr(parts.forward, "meta", {}).get("memory_budget"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Halves:
    """Both halves of a split. `roots`: the name of a saved value by its storage in the forward. `kept`: the storages
    that outlive the forward; `alive`: the storages that the backward begins with, `others` its bytes outside its
    inputs.
    """

    forward: Half
    backward: Half
    roots: dict[int, str]
    kept: set[int]
    alive: set[int]
    others: int

    def staying(self, *, gradients: bool = True) -> set[int]:
        """The storages alive to the end of the backward; without `gradients`, as if these were handed on at once."""
        held = self.backward.storages.held_tangents(self.backward.index.backward_inputs)
        return held | {self.backward.root(node) for node in self.backward.outputs if gradients}

    def timelines(self, *, gradients: bool = True) -> tuple[Timeline, Timeline]:
        """The bytes alive in the forward and in the backward."""
        second = self.backward.timeline(
            self.alive,
            self.staying(gradients=gradients),
            self.others,
            skips=() if gradients else self.backward.index.last_views,
        )
        return self.forward.timeline(set(), self.kept), second


def halves_of(parts: Partitioned) -> Halves:
    """The halves of a split as numbered nodes and storages."""
    forward, backward = Half(parts.forward), Half(parts.backward)
    held = {forward.root(node) for node in forward.outputs[: parts.joint.signature.num_forward_outputs]}
    own = [node for node in parts.saved_nodes if forward.root(node) not in held and not forward.is_input(node)]
    roots: dict[int, str] = {}
    for node in own:  # views of a storage count once
        roots.setdefault(forward.root(node), node.name)
    alive = backward.alive({node.name: forward.size(node) for node in own}, set(roots.values()))
    kept = {forward.root(node) for node in forward.outputs}
    return Halves(forward, backward, roots, kept, alive, sum(forward.storages.size[r] for r in held))


class Half:
    """A half as numbered nodes and storages."""

    def __init__(self, module: fx.GraphModule) -> None:
        *_, output = module.graph.nodes
        results = output.args[0] if output.args and isinstance(output.args[0], (list, tuple)) else ()
        self.outputs = [node for node in results if isinstance(node, fx.Node)]
        self.index = JointIndex(module, 0)
        self.storages = Storages(self.index)

    @cached_property
    def cost(self) -> list[int]:
        """The cost of each node, in the cost model's operations."""
        return costs(self.index, analytic_cost)

    def root(self, node: fx.Node) -> int:
        return self.storages.root[self.index.number[node]]

    def size(self, node: fx.Node) -> int:
        return self.storages.size[self.root(node)]

    def is_input(self, node: fx.Node) -> bool:
        return self.index.kinds[self.root(node)] is Kind.INPUT

    def alive(self, sizes: dict[str, int], counted: set[str]) -> set[int]:
        """The storages of a backward that are alive when it starts: saved values by name, and all tangents."""
        storages = set()
        for i, node in enumerate(self.index.nodes):
            if node.op != "placeholder":
                continue
            if node.name in counted:
                self.storages.size[i] = sizes[node.name]
                storages.add(i)
            elif i in self.index.backward_inputs:
                self.storages.size[i] = nbytes(value_of(node))
                storages.add(i)
        return storages

    def timeline(self, alive: set[int], kept: set[int], others: int = 0, skips: Collection[int] = ()) -> Timeline:
        kinds = self.index.kinds
        order = [i for i, kind in enumerate(kinds) if kind not in (Kind.INPUT, Kind.CONSTANT) and i not in skips]
        return self.storages.timeline(order, alive, kept, others)

    def alive_at(self, at: int, timeline: Timeline, alive: Iterable[int], kept: Collection[int]) -> dict[int, int]:
        """The storages alive while the operator at a place of a timeline runs, with their bytes. `alive` and `kept`: as
        in `Storages.timeline`.
        """
        storages, born, last = self.storages, dict.fromkeys(alive, -1), {}
        for k, i in enumerate(timeline.order):
            born.setdefault(storages.root[i], k)
            for holder, _ in storages.results.get(i, ()):
                born.setdefault(i if holder is None else holder, k)
            last.update(dict.fromkeys(storages.touched[i], k))
        return {
            root: storages.size[root]
            for root, k in born.items()
            if storages.size[root] and k <= at and root in last and (root in kept or last[root] >= at)
        }

    def named(self, timeline: Timeline) -> tuple[tuple[str, int], ...]:
        return tuple((self.index.nodes[i].name, live) for i, live in zip(timeline.order, timeline.bytes, strict=True))

    def work(self) -> int:
        return sum(self.cost)

    def describe(self, i: int) -> str:
        node = self.index.nodes[i]
        line = user_line(node)
        return f"{node.name}, {line}" if line else str(node.name)


Span = Callable[[fx.Node], tuple[int, int]]


def _spans(forward: Half, backward: Half, first: Timeline, second: Timeline) -> Span:
    """For a saved value, where its memory is made and where it is read last."""
    made_at = {root: at for at, i in reversed(list(enumerate(first.order))) for root in (forward.storages.root[i], i)}
    last_read_at = {root: at for at, i in enumerate(second.order) for root in backward.storages.touched[i]}
    takes = {node.name: i for i, node in enumerate(backward.index.nodes) if node.op == "placeholder"}

    def span(node: fx.Node) -> tuple[int, int]:
        return made_at.get(forward.root(node), 0), last_read_at.get(takes.get(node.name, -1), 0)

    return span


def _saved_values(forward: Half, saved: Sequence[fx.Node], roots: dict[int, str], span: Span) -> Iterable[SavedValue]:
    for node in saved:
        spec = spec_of(node)
        if not isinstance(spec, TensorSpec):
            kind, size = "number", 0
        elif is_offloaded(node):
            kind, size = "offloaded", nbytes(value_of(node))
        elif forward.is_input(node):
            kind, size = "input", nbytes(value_of(node))
        else:
            root = forward.root(node)
            kind = "saved" if root in roots else "output"
            size = forward.size(node) if kind == "output" or roots[root] == node.name else 0
        names = dict.get(node.meta, "checkpoint_names", ())
        yield SavedValue(node.name, user_line(node), spec if kind != "number" else None, size, kind, names, span(node))


def _recomputed(forward: Half, backward: Half) -> Iterable[Recomputed]:
    """Operators of the backward that are copies of the forward's: each half names a copy as the joint graph does."""
    target_by_name = {node.name: node.target for node in forward.index.nodes if node.op == "call_function"}
    for i, node in enumerate(backward.index.nodes):
        if node.op == "call_function" and target_by_name.get(node.name) is node.target and backward.cost[i]:
            op = str(node.target)
            yield Recomputed(node.name, op, user_line(node), flops(node), backward.cost[i])


def _bars(steps: Sequence[tuple[str, int]], cells: int, peak: int) -> str:
    if not steps or not peak:
        return ""
    bars = []
    for k in range(cells):
        part = steps[k * len(steps) // cells : max(k * len(steps) // cells + 1, (k + 1) * len(steps) // cells)]
        most = max(live for _, live in part)
        bars.append(_BARS[-(-most * (len(_BARS) - 1) // peak)])
    return "".join(bars)
