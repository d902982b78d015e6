"""Functions under `torch.compiler.disable`, which a capture redirects. Checked on torch 2.13.0.

Such a function is a closure of PyTorch's which asks Dynamo for its callback, then calls the user's function, a free
variable of it. When it asks, during a capture, that variable is bound to a function of ours for this one call.
Functions that PyTorch itself has disabled (checkpoints, optimizers) are not redirected.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["is_disabled_by_torch", "redirect"]

_VARIABLE = "fn"


@functools.cache
def _code_of_wrappers() -> types.CodeType | None:
    """The code that all disabled functions share."""
    context = getattr(sys.modules.get("torch._dynamo.eval_frame"), "DisableContext", None)
    code = getattr(vars(context).get("__call__"), "__code__", None) if context is not None else None
    inner = [c for c in getattr(code, "co_consts", ()) if isinstance(c, types.CodeType) and _VARIABLE in c.co_freevars]
    return inner[0] if len(inner) == 1 else None


def _bind(frame: types.FrameType, value: Any) -> None:
    """Set the free variable of a running wrapper."""
    frame.f_locals[_VARIABLE] = value
    if sys.version_info < (3, 13):  # where `f_locals` is a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def redirect(frame: types.FrameType, region_runner: Callable[[], Any]) -> None:
    """Let the wrapper that runs in `frame` call the result of `region_runner()` with the user's function."""
    if frame.f_code is not _code_of_wrappers():
        return
    function = frame.f_locals[_VARIABLE]
    if isinstance(function, _Redirected) or is_disabled_by_torch(function):
        return
    _bind(frame, _Redirected(function, region_runner))


class _Redirected:
    """Replacement for a disabled function during one call; other threads may call it meanwhile."""

    def __init__(self, function: Callable[..., Any], region_runner: Callable[[], Any]) -> None:
        self.function, self.region_runner = function, region_runner
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_locals.get(_VARIABLE) is self:
            _bind(frame, self.function)
        run = None if _makes_tensor(self.function, args) else self.region_runner()
        return self.function(*args, **kwargs) if run is None else run(self.function, args, kwargs)


def _makes_tensor(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether the function is the constructor of a tensor subclass, which the class's operators call too. Its result is
    part of a graph, its code is not.
    """
    if not args or getattr(function, "__name__", "") not in ("__new__", "__init__"):
        return False
    return issubclass(args[0] if isinstance(args[0], type) else type(args[0]), torch.Tensor)


def is_disabled_by_torch(function: Any) -> bool:
    """Whether a disabled function is PyTorch's, or disabled by PyTorch: a method belongs to its object, and the handler
    of every dispatch mode is disabled by PyTorch.
    """
    if getattr(function, "__name__", "") == "__torch_dispatch__":
        return True
    owner = getattr(function, "__self__", None)
    module = type(owner).__module__ if owner is not None else getattr(function, "__module__", None)
    if owner is not None and getattr(function, "__name__", "") in ("__call__", "_wrapped_call_impl", "_call_impl"):
        return False  # a module that the user has disabled
    return str(module).partition(".")[0] == "torch"
