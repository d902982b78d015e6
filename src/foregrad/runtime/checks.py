"""Operators without results, run on values that a graph computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..graph.effects import CheckInfo, Given, Result
from ..graph.signature import Signature
from ..graph.spelling import call_keywords, shown
from .lines import LineWriter, op_name


def passes(check: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a check does not raise."""
    try:
        check(*args, **kwargs)
    except Exception:
        return False
    return True


def check_arguments(writer: LineWriter, check: CheckInfo, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """The arguments of a check, as text."""

    def text(value: Any) -> str:
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
    """The lines of a check of the forward. If it fails, the statement `eagerly` runs, which raises as eager does.

    Eager then has its effects before the check, and the function may catch the error. An operator of the user's must
    not run twice: after one has run, a check raises by itself.
    """
    first = next((i for i, check in enumerate(signature.checks) if not check.only_raises), len(signature.checks))

    def lines(check: CheckInfo, undo: list[str]) -> list[str]:
        op = writer.bind(op_name(check.op), check.op)
        arguments = check_arguments(writer, check, inputs, outputs)
        if signature.checks.index(check) > first:
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
