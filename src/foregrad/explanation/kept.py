"""Values saved for the backward, in the user's words: their names, the lines that make them, and what reads them."""

from __future__ import annotations

import dataclasses
import re

from ..graph.partitioned import Partitioned
from ..graph.slots import Checked, Decision, Updated
from ..partitioners.report import Report, SavedValue
from .graphs import Rows
from .tree import Again, Memory, Operator, Saved

__all__ = ["memory_of"]

_CODE = re.compile(r":\d+ in [^:]*: (.*)$")
_ASSIGNED = re.compile(r"^\s*([A-Za-z_][\w.]*)(?:\s*:[^=]+)?\s*=[^=]")
_MOST_READERS = 8


def memory_of(parts: Partitioned, report: Report, rows: Rows) -> Memory:
    """The memory of a step as the graphs foresee it."""
    by_key = rows.by_key()
    readers: dict[str, list[str]] = {}
    for one in rows.operators:
        for key in one.reads:
            readers.setdefault(key, []).append(one.key)
    forward = len(report.forward)
    slots = parts.joint.slot_texts()
    own = _own_results(parts)
    values = [dataclasses.replace(v, kind="saved") if v.name in own else v for v in report.saved]
    saved = [_saved(value, by_key, readers, rows, forward, slots.get(value.name, "")) for value in values]
    work = report.work or 1
    again = [
        Again(one.name, by_key[f"b:{one.name}"].op, _module(by_key.get(f"b:{one.name}"), rows), one.line or "",
              one.flops, one.cost / work)
        for one in report.recomputed
    ]  # fmt: skip
    return Memory(
        report.peak,
        report.peak_at,
        sum(value.nbytes for value in values if value.kind == "saved"),
        tuple(saved),
        tuple(again),
        tuple(live for _, live in (*report.forward, *report.backward)),
        forward,
    )


def _own_results(parts: Partitioned) -> set[str]:
    """Results that the caller does not get: new values of inputs, of which it gets the elements, and values looked at.
    The backward alone keeps them.
    """
    *_, output = parts.forward.graph.nodes
    pairs = list(zip(output.args[0], parts.joint.signature.graph_outputs, strict=False))
    seen = {node for node, slot in pairs if not isinstance(slot, (Updated, Decision, Checked))}
    return {node.name for node, _ in pairs if node not in seen and node.op != "placeholder"}


def _saved(
    value: SavedValue,
    by_key: dict[str, Operator],
    readers: dict[str, list[str]],
    rows: Rows,
    forward: int,
    slot: str,
) -> Saved:
    key = f"f:{value.name}"
    one = by_key.get(key)
    read_by = _readers(key, by_key, readers)
    line = value.line or (rows.lines[one.line] if one is not None else "") or ""
    return Saved(
        name=value.name,
        variable=", ".join(value.names)
        or slot
        or (variable_in(line) if one and _is_last(one, by_key, readers, rows) else ""),
        op="" if one is None else _maker(one, by_key).op,
        type="" if value.spec is None else repr(value.spec),
        nbytes=value.nbytes,
        kind=value.kind,
        module=_module(one, rows),
        line=line,
        why=_why(read_by, by_key, rows),
        readers=tuple(read_by[:_MOST_READERS]),
        born=value.span[0],
        dies=forward + value.span[1],
    )


def _maker(one: Operator, by_key: dict[str, Operator]) -> Operator:
    """The operator that made a value's memory: what a view is of."""
    while one.view_of in by_key:
        one = by_key[one.view_of]
    return one


def _is_last(one: Operator, by_key: dict[str, Operator], readers: dict[str, list[str]], rows: Rows) -> bool:
    """Whether nothing else that the same line computes in the forward is made of a value: it is the line's result.

    The line may call modules; the same line in another layer is another call of it.
    """
    own = rows.modules[one.module][0]
    return not any(
        (other.line, other.half) == (one.line, one.half) and _is_inside(own, rows.modules[other.module][0])
        for other in (by_key[key] for key in readers.get(one.key, ()))
    )


def _is_inside(one: str, other: str) -> bool:
    """Whether one of two modules, by their paths, is in the other."""
    short, long = sorted((one, other), key=len)
    return not short or long == short or long.startswith(f"{short}.")


def _readers(key: str, by_key: dict[str, Operator], readers: dict[str, list[str]]) -> list[str]:
    """The operators that read a value, through views of it."""
    found: dict[str, None] = {}
    waiting = [key]
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if by_key[reader].half == "forward":
                continue
            if by_key[reader].role == "view":
                waiting.append(reader)
            else:
                found.setdefault(reader)
    return list(found)


def _why(read_by: list[str], by_key: dict[str, Operator], rows: Rows) -> str:
    if not read_by:
        return "a derivative of the backward may read it"
    first = by_key[read_by[0]]
    what = "runs again in the backward and reads it" if first.role == "again" else "reads it"
    line = rows.lines[first.line]
    more = f", and {len(read_by) - 1} more" if len(read_by) > 1 else ""
    return f"{first.op} {what}{more}{f': the backward of {line}' if line and first.role != 'again' else ''}"


def _module(one: Operator | None, rows: Rows) -> str:
    return "" if one is None else rows.modules[one.module][0]


def variable_in(line: str) -> str:
    """The variable that the user's line assigns: `scores` of `model.py:3 in forward: scores = q @ k`."""
    code = _CODE.search(line)
    match = _ASSIGNED.match(code[1]) if code else None
    return match[1] if match else ""
