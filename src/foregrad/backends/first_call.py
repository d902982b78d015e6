"""A function whose first call goes another way, at no cost for later calls.

A second Python frame would cost more than the call itself. So no wrapper is put around the function: a stand-in takes
over its code after the first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["FirstCall", "Run", "after_first_call", "beginning"]

Run = Callable[[list[Any]], list[Any]]
FirstCall = Callable[[Run, list[Any]], tuple[list[Any], Run | None]]


def beginning(run: Run, first_call: FirstCall, settle: Callable[[Run], None]) -> Run:
    """`first_call` of `run`, which passes the function for later calls to `settle`."""

    def begin(args: list[Any]) -> list[Any]:
        out, later = first_call(run, args)
        if later is not None:
            settle(later)
        return out

    return begin


def after_first_call(function: Any, first_call: FirstCall) -> Run:
    """A stand-in for a function of the eager backend's, whose first call goes to `first_call`."""
    stand_in: Any = FunctionType(_STUB, {}, "forward")
    reference = weakref.ref(stand_in)

    def settle(later: Any) -> None:
        target: Any = reference()
        if target is None:
            return
        target.__globals__["__run__"] = later  # also for a thread inside the stub
        is_rendered = type(function) is FunctionType and getattr(function, "source", None) is not None
        if later is function and is_rendered and not function.__code__.co_freevars:  # a wrapper's code needs its cells
            target.__globals__.update(function.__globals__)
            target.__code__ = function.__code__

    stand_in.__globals__["__run__"] = beginning(function, first_call, settle)
    stand_in._boxed_call = True
    stand_in.returns_list = True
    if hasattr(function, "source"):
        stand_in.source = function.source
    return stand_in  # type: ignore[no-any-return]


def _stub(args: list[Any]) -> Any:
    return __run__(args)  # type: ignore[name-defined]  # noqa: F821 - in the globals that the code is given


_STUB = _stub.__code__
