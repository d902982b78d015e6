"""Dynamo is off during a capture, so compiled functions inside run as Python. Checked on torch 2.11.0, 2.13.0.

Dynamo traces every frame of Python that runs under it, also frames called from C++ that may not raise: an error of its
own there ends the process. And graphs that it makes of fakes are useless.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..locks import Bind
from .disabled import redirect

__all__ = ["dynamo_off", "install"]

_EVAL_FRAME = "torch._dynamo.eval_frame"
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"  # if that is not loaded, it is not on
_set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
_original_compile = torch.compile


@contextlib.contextmanager
def dynamo_off() -> Iterator[None]:
    """Context: on this thread, Dynamo traces no frames and no backwards, until code inside turns it on."""
    no_backwards = getattr(sys.modules.get(_COMPILED_AUTOGRAD), "_disable", contextlib.nullcontext)
    before = _set_eval_frame(None)
    try:
        with no_backwards():
            yield
    finally:
        _set_eval_frame(before)


def install(bind: Bind, is_capturing: Callable[[], bool], region_runner: Callable[[], Any]) -> None:
    """Make functions that Dynamo compiled run as Python, on threads on which `is_capturing()` is true. Functions that
    are disabled for Dynamo run by the result of `region_runner()`.
    """

    def compile(model: Any = None, **options: Any) -> Any:
        if not is_capturing():
            return _original_compile(model, **options)
        return (lambda function: function) if model is None else model

    bind(torch, "compile", compile)
    module: Any = sys.modules.get(_EVAL_FRAME)
    original = getattr(module, "_callback_from_stance", None)
    if original is None:
        return

    def callback_from_stance(callback: Any) -> Any:
        if not is_capturing():
            return original(callback)
        count = getattr(module, "set_fullgraph_compiled_frame_count", None)
        if count is not None:
            count(-1)  # no full graph is required here
        if callback is None and region_runner() is not None:
            redirect(sys._getframe(1), region_runner)
        return None

    bind(module, "_callback_from_stance", callback_from_stance)
