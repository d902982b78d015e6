"""`torch.cond`, `switch`, `torch.while_loop` and other operators that take functions, as equivalent Python.

While a function is captured, a branch is a Python `if` on a value and a loop is a Python `while`: the branch taken is
recorded, and its condition becomes one of the graph's decisions. As in eager, two things differ from a plain `if`. An
operand that the branch taken does not use gets a gradient of zeros, as does a tensor that only another branch closes
over; and all results have a history if one of these has. (Parameters of a module that only the other branch closes over
are no operands here: unused, they have no gradient.) The other operators are in `loops`; `flex_attention` stays one
operator. Checked on torch 2.11.0, 2.13.0, 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator

from ..errors import UnsupportedOpError
from .flex import ATTENTION, BACKWARD
from .loops import MEANINGS, run_while
from .operand_gradients import connected, with_unused

__all__ = ["Attention", "install", "remove"]

_original_asked = torch.compiler.is_dynamo_compiling
# The functions that users call: each has Dynamo compile it, unless Dynamo does so already.
_FRONTS = {
    ("torch._higher_order_ops.cond", "cond"),
    ("torch._higher_order_ops.while_loop", "while_loop"),
    ("torch._higher_order_ops.strict_mode", "strict_mode"),
    ("torch._higher_order_ops.map", "map"),
    ("torch.nn.attention.flex_attention", "flex_attention"),
    ("torch._higher_order_ops.utils", "_maybe_compile_and_run_fn"),
}


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    return _branch(0 if pred else 1, (true_fn, false_fn), operands)


def _switch(index: Any, branches: Any, operands: Any = ()) -> Any:
    return _branch(int(index), branches, operands)


def _branch(taken: int, branches: Sequence[Any], operands: Any) -> Any:
    result = connected(branches[taken], tuple(operands))
    operand_ids = {id(tensor) for tensor in (*operands, *_closed_over(branches[taken]))}
    others = {id(tensor): tensor for branch in branches for tensor in _closed_over(branch) if tensor.requires_grad}
    return with_unused(result, [tensor for key, tensor in others.items() if key not in operand_ids])


def _closed_over(branch: Any) -> list[torch.Tensor]:
    """The tensors among the closure and global variables that a branch names."""
    branch = getattr(branch, "keywords", {}).get("branch_fn", branch)  # `switch` gives its branches flat operands
    code = getattr(branch, "__code__", None)
    if code is None:
        return []
    variables = [branch.__globals__.get(name) for name in code.co_names]
    for cell in branch.__closure__ or ():
        with contextlib.suppress(ValueError):  # not bound yet
            variables.append(cell.cell_contents)
    return [value for value in variables if isinstance(value, torch.Tensor)]


def _while_loop(
    cond_fn: Any, body_fn: Any, carried_inputs: Any, additional_inputs: Any = (), mutated_arg_indices: str = ""
) -> Any:
    count = len(carried_inputs)

    def loop(*values: Any) -> tuple[Any, ...]:
        return run_while(cond_fn, body_fn, values[:count], values[count:])

    return connected(loop, (*carried_inputs, *additional_inputs))


def _subgraph(subgraph: Any, identifier: str | None, *operands: Any) -> Any:
    return subgraph(*operands)


def print_formatted(format_str: str, *args: Any, **kwargs: Any) -> None:
    """The effect of the operator `print`, on tensors of the call."""
    print(format_str.format(*args, **kwargs))


_BY_NAME: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "switch": _switch,
    "while_loop": _while_loop,
    "invoke_subgraph": _subgraph,
}
_MEANING: dict[type, Callable[..., Any]] = {
    type(getattr(torch.ops.higher_order, name)): meaning
    for name, meaning in {**_BY_NAME, **MEANINGS}.items()
    if hasattr(torch.ops.higher_order, name)
}
_Print = type(getattr(torch.ops.higher_order, "print", None))
if _Print is not type(None):
    _MEANING[_Print] = print_formatted
_original: dict[type, Any] = {kind: kind.__call__ for kind in (*_MEANING, type(ATTENTION), type(BACKWARD))}


class Attention(Protocol):
    """Implementations of `flex_attention` and its backward in a capture."""

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, *args: Any, **kwargs: Any) -> Any: ...


def install(
    is_capturing: Callable[[], bool], runner: Callable[[], Any], attention: Callable[[], Attention | None]
) -> None:
    """Install the Python equivalents, for threads on which `is_capturing()` is true; `runner()` gives
    `run(function, args, kwargs)`, which runs a function on real tensors in each call.
    """
    meanings = dict(_MEANING)

    def printing(format_str: str, *args: Any, **kwargs: Any) -> Any:
        return runner()(print_formatted, (format_str, *args), kwargs)

    if _Print in meanings:
        meanings[_Print] = printing

    def attending(part: str, *args: Any, **kwargs: Any) -> Any:
        here = attention()
        if here is None:
            raise UnsupportedOpError(
                "`flex_attention` is called in the derivative of a backward, which can't be compiled. Take that "
                "derivative outside the compiled function."
            )
        return getattr(here, part)(*args, **kwargs)

    meanings[type(ATTENTION)] = functools.partial(attending, "forward")
    meanings[type(BACKWARD)] = functools.partial(attending, "backward")

    def replaced(kind: type) -> Callable[..., Any]:
        original, meaning = _original[kind], meanings[kind]

        def call(self: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
            return meaning(*args, **kwargs) if is_capturing() else original(self, *args, **kwargs)

        return call

    def asked() -> bool:
        frame = sys._getframe(1)
        if is_capturing() and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _FRONTS:
            return True
        return _original_asked()

    for kind in _original:
        kind.__call__ = replaced(kind)  # type: ignore[method-assign]
    torch.compiler.is_dynamo_compiling = asked


def remove() -> None:
    """Restore torch's own."""
    for kind, original in _original.items():
        kind.__call__ = original  # type: ignore[method-assign]
    torch.compiler.is_dynamo_compiling = _original_asked
