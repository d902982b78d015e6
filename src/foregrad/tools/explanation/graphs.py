"""The halves of a compiled function as rows: each operator with its module, line, sizes, cost and operands."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from foregrad.graph.joint import Partitioned
from foregrad.graph.meta import TensorSpec, spec_of, value_of
from foregrad.graph.printing import print_graph, user_line
from foregrad.partitioners import Kind, Report, amount, flops, in_bytes, is_counted, kind_of, value_bytes

from .tree import Operator, PrintedGraph, SavedTensor, Work

_NOTHING = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.ITEM, Kind.VIEW)


@dataclasses.dataclass(frozen=True)
class Rows:
    """All operators, and their shared memory. `known`: the operations that PyTorch's counter knows of."""

    operators: tuple[Operator, ...]
    modules: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    known: int

    def by_key(self) -> dict[str, Operator]:
        return {operator.key: operator for operator in self.operators}


class _Collector:
    """Numbers modules and lines as they come."""

    def __init__(self, parts: Partitioned, report: Report) -> None:
        self.parts = parts
        self.alive = {"f": dict(report.forward), "b": dict(report.backward)}
        self.saved = {node.name for node in parts.saved_nodes}
        self.again = {one.name for one in report.recomputed}
        self.modules: dict[tuple[str, str], int] = {("", ""): 0}
        self.lines: dict[str, int] = {"": 0}
        self.places: dict[str, tuple[int, int]] = {}  # of the forward's operators: their module and line
        self.operators: list[Operator] = []
        self.known = 0

    def half(self, module: fx.GraphModule, half: str) -> None:
        keys: dict[fx.Node, str] = {}
        takes = len(self.parts.saved_nodes)
        for number, node in enumerate(module.graph.nodes):
            if node.op == "output":
                continue
            if half == "b" and node.op == "placeholder" and number < takes:
                keys[node] = f"f:{node.name}"
                continue
            keys[node] = f"{half}:{node.name}"
            self.operators.append(self.row(node, half, keys))

    def row(self, node: fx.Node, half: str, keys: Mapping[fx.Node, str]) -> Operator:
        kind = kind_of(node)
        operations = flops(node)
        self.known += operations if is_counted(node) else 0
        nbytes = value_bytes(value_of(node))
        moved = 0 if kind in _NOTHING else nbytes + sum(value_bytes(value_of(n)) for n in node.all_input_nodes)
        place, reads = self.place(node), tuple(keys[n] for n in node.all_input_nodes if n in keys)
        if half == "f":
            self.places[node.name] = place
        elif place == (0, 0):  # a copy of the forward's may not know
            place = self.places.get(node.name, place)
        return Operator(
            key=f"{half}:{node.name}",
            op=name_of(node),
            half="forward" if half == "f" else "backward",
            role=self.role(node, half, kind),
            module=place[0],
            line=place[1],
            type=type_of(node),
            nbytes=nbytes,
            moved=moved,
            flops=operations,
            alive=self.alive[half].get(node.name, 0),
            sequence=int(node.meta.get("seq_nr", -1)),
            view_of=reads[0] if kind in (Kind.VIEW, Kind.ITEM) and reads else "",
            reads=reads,
        )

    def role(self, node: fx.Node, half: str, kind: Kind) -> str:
        if node.op == "placeholder":
            return "input" if half == "f" else "tangent"
        if half == "f" and node.name in self.saved:
            return "saved"
        if half == "b" and node.name in self.again:
            return "again"
        return "view" if kind in _NOTHING else "operator"

    def place(self, node: fx.Node) -> tuple[int, int]:
        stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        nearest = ("", "")
        for path, cls in stack.values():
            name = re.sub(r"^self\.?|@\d+$", "", str(path))
            nearest = (name, cls if isinstance(cls, str) else cls.__name__)
            self.modules.setdefault(nearest, len(self.modules))
        line = user_line(node) or ""
        return self.modules[nearest], self.lines.setdefault(line, len(self.lines))


def rows_of(parts: Partitioned, report: Report) -> Rows:
    """Every operator of both halves, in the order they run."""
    collector = _Collector(parts, report)
    collector.half(parts.forward, "f")
    collector.half(parts.backward, "b")
    return Rows(tuple(collector.operators), tuple(collector.modules), tuple(collector.lines), collector.known)


def work_of(rows: Rows) -> Work:
    """The operations and the memory traffic of one call."""

    def total(half: str, field: str) -> int:
        return sum(getattr(one, field) for one in rows.operators if one.half == half)

    def count(half: str) -> int:
        roles = ("operator", "saved", "again")
        return sum(one.half == half and one.role in roles and bool(one.moved) for one in rows.operators)

    return Work(
        total("forward", "flops"),
        total("backward", "flops"),
        rows.known,
        sum(one.flops for one in rows.operators if one.role == "again"),
        total("forward", "moved"),
        total("backward", "moved"),
        count("forward"),
        count("backward"),
    )


def name_of(node: fx.Node) -> str:
    """The operator's name, `aten.mm`."""
    if node.op != "call_function":
        return str(node.op)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return str(getattr(node.target, "__name__", node.target))
    name = schema.name.replace("::", ".")
    return f"{name}.{schema.overload_name}" if schema.overload_name else str(name)


def type_of(node: fx.Node) -> str:
    """The dtype and shape of a node's value, `f32[8, 16]`."""
    spec = spec_of(node)
    if isinstance(spec, TensorSpec):
        return repr(spec)
    return f"({', '.join(map(str, spec))})" if isinstance(spec, (tuple, list)) else ""


_PLACE = re.compile(r"(.*):(\d+) in [^:]*(?:: (.*))?$")


def own_source(rows: Rows, saved: Sequence[SavedTensor]) -> PrintedGraph:
    """The user's lines that ran, with the bytes that each keeps for the backward, and its operations."""
    costs: dict[str, list[int]] = {line: [0, 0] for line in rows.lines if _PLACE.match(line)}
    first: dict[str, str] = {}
    for one in rows.operators:
        line = rows.lines[one.line]
        if line in costs:
            costs[line][1] += one.flops
            if one.role not in ("view", "input", "tangent"):
                first.setdefault(line, one.key)
    for value in saved:
        if value.line in costs and value.kind == "saved":
            costs[value.line][0] += value.nbytes
    found = []
    for line, (nbytes, operations) in costs.items():
        if place := _PLACE.match(line):
            text = f"{in_bytes(nbytes):>10}  {amount(operations)}FLOP".ljust(26)
            text += f"{place[1]}:{place[2]}  {place[3] or ''}"
            found.append((place[1], int(place[2]), text, first.get(line, "")))
    head = f"{'kept':>10}  operations".ljust(26) + "line"
    return PrintedGraph(
        "your code", (head, *(text for *_, text, _ in sorted(found))), ("", *(key for *_, key in sorted(found)))
    )


_ASSIGNED = re.compile(r"    (\w+) = ")
_TAKEN = re.compile(r"    (\w+),  # ")


def sources_of(parts: Partitioned, runtime: str) -> tuple[PrintedGraph, ...]:
    """The printed halves and the code around them; each line with the operator that it computes."""
    slots, sources = parts.joint.slot_texts(), []
    halves = [("forward", parts.forward, "f")]
    if not parts.joint.signature.is_inference:
        halves.append(("backward", parts.backward, "b"))
    for title, module, half in halves:
        lines = print_graph(module, header=f"{title} of {parts.joint.name}", slots=slots).splitlines()
        saved = {node.name for node in parts.saved_nodes} if half == "b" else set()
        keys = []
        for line in lines:
            match = _ASSIGNED.match(line) or _TAKEN.match(line)
            name = match[1] if match else ""
            keys.append(f"{'f' if name in saved else half}:{name}" if name else "")
        sources.append(PrintedGraph(title, tuple(lines), tuple(keys)))
    lines = runtime.splitlines()
    return (*sources, PrintedGraph("call code", tuple(lines), ("",) * len(lines)))
