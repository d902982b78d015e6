"""Dynamo compiles nothing of what a capture runs: compiled functions inside are Python to it. Checked on torch 2.11.0,
2.13.0.

Dynamo looks at every frame of Python that runs under it, those too that C++ calls where no exception may leave: an
error of its own there ends the process. And what it makes of fakes is of no use to anybody.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .disabled import redirect

__all__ = ["dynamo_off", "install", "remove"]

_EVAL_FRAME = "torch._dynamo.eval_frame"
_set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
_original_compile = torch.compile
_originals: dict[str, Any] = {}


@contextlib.contextmanager
def dynamo_off() -> Iterator[None]:
    """Context: on this thread, Dynamo looks at no frames, until something inside calls for it."""
    before = _set_eval_frame(None)
    try:
        yield
    finally:
        _set_eval_frame(before)


def install(is_capturing: Callable[[], bool], region_runner: Callable[[], Any]) -> None:
    """Make functions that Dynamo compiled run as they are, on threads on which `is_capturing()` says so; those that it
    is told to leave alone, by what `region_runner()` gives there.
    """

    def compile(model: Any = None, **options: Any) -> Any:
        if not is_capturing():
            return _original_compile(model, **options)
        return (lambda function: function) if model is None else model

    torch.compile = compile
    module: Any = sys.modules.get(_EVAL_FRAME)
    original = getattr(module, "_callback_from_stance", None)
    if original is None:
        return

    def callback_from_stance(callback: Any) -> Any:
        if not is_capturing():
            return original(callback)
        count = getattr(module, "set_fullgraph_compiled_frame_count", None)
        if count is not None:
            count(-1)  # nobody asks whether a graph was made of all of it
        if callback is None and region_runner() is not None:
            redirect(sys._getframe(1), region_runner)
        return None

    _originals["_callback_from_stance"] = original
    module._callback_from_stance = callback_from_stance


def remove() -> None:
    """Put torch's own back."""
    torch.compile = _original_compile
    if _originals:
        sys.modules[_EVAL_FRAME]._callback_from_stance = _originals.pop("_callback_from_stance")  # type: ignore[attr-defined]
