"""Lines that test the program's decisions, and run its checks, before any result of the graph can be seen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.symbols import expression_text
from ..backends.in_place import WROTE
from ..errors import ForegradError
from ..graph.attempts import RaisedInCallError, attempts
from ..graph.effect_log import CheckInfo, Given, Result
from ..graph.joint import JointGraph
from ..graph.signature import DecisionInfo, Signature
from ..graph.source import call_keywords, literal, shown
from ..interrupts import is_interrupt
from .lines import LineWriter, op_name

Bind = Callable[[str, object], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """The statements that end a call with a wrong graph: `diverged` if a decision differs, `checked` if a check fails,
    `faulted` if the graph raised `fault`.
    """

    diverged: str
    checked: str
    faulted: str


def attempt_lines(
    writer: LineWriter, signature: Signature, inputs: list[str], run: list[str]
) -> tuple[list[str], list[str]]:
    """(`run`, a graph's lines, in a `try`, up to the block after a `fault`; lines to undo the call)."""
    bind = writer.bind
    save, undo = generator_lines(signature.stops.generators, bind)
    if not signature.is_inference:
        marked = [i for i in sorted(signature.marked) if not signature.inputs[i].requires_grad]
        undo += [f"{inputs[i]}.requires_grad_(False)" for i in marked]
    if signature.stops.eager_regions:
        bind("eager_regions", signature.stops.eager_regions)  # the graph holds only their keys
        save = [f"{bind('begin_regions', attempts().begin)}()", *save]
        undo = [f"{bind('rewind_regions', attempts().rewind)}()", *undo]
    caught = ["except BaseException as error:", f"    fault = {bind('unless_ended', unless_ended)}(error)"]
    return [*save, "try:", *("    " + line for line in run), *caught], undo


def decision_lines(
    writer: LineWriter,
    joint: JointGraph,
    outputs: list[str],
    undo: list[str],
    diverged: str,
    checks: Callable[[CheckInfo, list[str]], list[str]],
) -> list[str]:
    """Tests of the decisions of a graph that has run. `writer` has the variables of all symbolic sizes, `open_sizes`
    among them. `checks` gives the lines of a check, from the check and the lines that undo the call so far.
    """
    bind, symbols = writer.bind, writer.symbols
    signature = joint.signature
    fallback, lines = [*undo, diverged], list[str]()
    for number, decision in enumerate(signature.stops.decisions):
        lines += _before(signature, number, checks, undo)
        if decision.symbol is None:
            condition = _differs(outputs[decision.output], decision, bind)
        else:
            condition = f"not ({range_text(joint.symbols, decision.symbol, symbols[decision.symbol])})"
        lines.append(f"if {condition}:  # {shown(decision.where, 2_000)}")
        lines += ["    " + line for line in fallback]
    for guard in joint.symbols.guards() if joint.symbols is not None else ():
        if any(symbol in joint.symbols.computed for symbol in guard.free_symbols):
            lines.append(f"if not ({expression_text(guard, symbols, bind)}):")
            lines += ["    " + line for line in fallback]
    lines += _before(signature, None, checks, undo)
    return [*lines, f"{bind('finish_regions', attempts().finish)}()"] if signature.stops.eager_regions else lines


def _before(
    signature: Signature, decision: int | None, checks: Callable[[CheckInfo, list[str]], list[str]], undo: list[str]
) -> list[str]:
    """The checks right before a decision; None: after the last."""
    count = len(signature.stops.decisions)
    at = count if decision is None else decision
    chosen = [c for c in signature.stops.checks if min(c.after, count) == at]
    return [line for check in chosen for line in checks(check, undo)]


def generator_lines(generators: Sequence[torch.Generator], bind: Bind) -> tuple[list[str], list[str]]:
    """Lines that save the states of generators, and lines that restore them."""
    save, undo = [], []
    for index, generator in enumerate(generators):
        name = bind("generator", generator)
        state = bind(f"{name}_state_{index}", None)
        save.append(f"{state} = {name}.get_state()")
        undo.append(f"{name}.set_state({state})")
    return save, undo


def open_sizes(signature: Signature, outputs: list[str]) -> dict[object, str]:
    """The variables of the symbolic sizes that the graph itself computes."""
    return {info.symbol: outputs[info.output] for info in signature.stops.decisions if info.symbol is not None}


def range_text(table: Any, symbol: object, variable: str) -> str:
    """The condition that a symbol has a value that the graph serves."""
    low, high = table.limits(symbol)
    if low == high:
        return f"{variable} == {low}"
    return f"{low} <= {variable}" if high is None else f"{low} <= {variable} <= {high}"


def unless_ended(error: BaseException) -> BaseException:
    """The error of a graph, for a call to be made again by other means. Raises interrupts, foregrad's own errors, and
    errors after the graph wrote to tensors: the call ends there.
    """
    if isinstance(error, RaisedInCallError):
        attempts().finish()
        raise error.error
    if isinstance(error, ForegradError) or WROTE in vars(error) or is_interrupt(error):
        raise error
    return error


def _differs(name: str, info: DecisionInfo, bind: Bind) -> str:
    value = info.value
    text = f"{name}.item()" if info.is_tensor else name
    if type(value) in (bool, int) and literal(value) is not None:
        return f"{text} != {value!r}"
    if type(value) is float and math.isfinite(value) and value:
        return f"{text} != {value!r}"
    return f"{bind('differs', _differ)}({text}, {bind('decided', value)})"


def _differ(value: Any, decided: object) -> bool:
    """Whether two numbers differ in their bits: NaN equals itself and -0.0 is not 0.0."""
    if isinstance(decided, complex):
        return _differ(value.real, decided.real) or _differ(value.imag, decided.imag)
    if isinstance(decided, float):
        if math.isnan(decided):
            return not math.isnan(value)
        return bool(value != decided) or math.copysign(1.0, value) != math.copysign(1.0, decided)
    return bool(value != decided)


# -------------------------------------------------------------------- checks
# Operators without results, run on values that a graph computed.


def passes(check: Callable[..., object], *args: object, **kwargs: object) -> bool:
    """Whether a check does not raise."""
    try:
        check(*args, **kwargs)
    except Exception:
        return False
    return True


def check_arguments(writer: LineWriter, check: CheckInfo, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """The arguments of a check, as text."""

    def text(value: object) -> str:
        if isinstance(value, Given):
            return inputs[value.input]
        if isinstance(value, Result):
            return outputs[value.output]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return writer.literal(value)

    keywords = call_keywords([(key, text(value)) for key, value in check.kwargs], writer.bind)
    return [*map(text, check.args), *keywords]


def check_lines(
    writer: LineWriter, signature: Signature, inputs: Sequence[str], outputs: Sequence[str], eagerly: str
) -> Callable[[CheckInfo, list[str]], list[str]]:
    """The lines of a check of the forward. If it fails, the statement `eagerly` runs: it raises as eager does.

    Eager then has its effects before the check, and the function may catch the error. An operator of the user's must
    not run twice: after one has run, a check raises by itself.
    """
    first = next(
        (i for i, check in enumerate(signature.stops.checks) if not check.only_raises), len(signature.stops.checks)
    )

    def lines(check: CheckInfo, undo: list[str]) -> list[str]:
        op = writer.bind(op_name(check.op), check.op)
        arguments = check_arguments(writer, check, inputs, outputs)
        if signature.stops.checks.index(check) > first:
            return one_call(op, arguments, check, undo)
        passes_ = writer.bind("passes", passes)
        head = f"if not {passes_}({', '.join([op, *arguments])}):  # {shown(check.where)}"
        return [head, *("    " + line for line in [*undo, eagerly])]

    return lines


def one_call(op: str, arguments: list[str], check: CheckInfo, undo: list[str]) -> list[str]:
    """The lines of a check that raises by itself."""
    call = f"{op}({', '.join(arguments)})  # {shown(check.where)}"
    if not undo:
        return [call]
    return ["try:", "    " + call, "except Exception:", *("    " + line for line in undo), "    raise"]
