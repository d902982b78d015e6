"""Dynamo is off during a capture, so compiled functions inside run as Python. Checked on torch 2.11.0, 2.13.0.

Dynamo traces every frame of Python that runs under it, also frames called from C++ that may not raise: an error of its
own there ends the process. And graphs that it makes of fakes are useless.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..locks import Bind

_EVAL_FRAME = "torch._dynamo.eval_frame"
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"  # if that is not loaded, it is not on
_set_eval_frame: Callable[[Any], object] = torch._C._dynamo.eval_frame.set_eval_frame
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
    """Make functions that Dynamo compiled run as Python, on threads where `is_capturing()` is true. Functions that are
    disabled for Dynamo run by the result of `region_runner()`.
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

    def callback_from_stance(callback: object) -> object:
        if not is_capturing():
            return original(callback)
        count = getattr(module, "set_fullgraph_compiled_frame_count", None)
        if count is not None:
            count(-1)  # no full graph is required here
        if callback is None and region_runner() is not None:
            redirect(sys._getframe(1), region_runner)
        return None

    bind(module, "_callback_from_stance", callback_from_stance)


# -------------------------------------------------------------------- functions under torch.compiler.disable
# Functions under `torch.compiler.disable`, which a capture redirects. Checked on torch 2.13.0.
#
# PyTorch wraps such a function in a closure. The closure asks Dynamo for its callback, then calls the user's function,
# a free variable. When the closure asks during a capture, the variable is bound to a function of ours for one call.
# Functions that PyTorch itself has disabled (checkpoints, optimizers) are not redirected.


_VARIABLE = "fn"


@functools.cache
def _code_of_wrappers() -> types.CodeType | None:
    """The code that all disabled functions share."""
    context = getattr(sys.modules.get("torch._dynamo.eval_frame"), "DisableContext", None)
    code = getattr(vars(context).get("__call__"), "__code__", None) if context is not None else None
    inner = [c for c in getattr(code, "co_consts", ()) if isinstance(c, types.CodeType) and _VARIABLE in c.co_freevars]
    return inner[0] if len(inner) == 1 else None


def _bind(frame: types.FrameType, value: object) -> None:
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

    def __init__(self, function: Callable[..., object], region_runner: Callable[[], Any]) -> None:
        self.function, self.region_runner = function, region_runner
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_locals.get(_VARIABLE) is self:
            _bind(frame, self.function)
        run = None if _makes_tensor(self.function, args) else self.region_runner()
        return self.function(*args, **kwargs) if run is None else run(self.function, args, kwargs)


def _makes_tensor(function: object, args: tuple[object, ...]) -> bool:
    """Whether the function is the constructor of a tensor subclass; the class's operators call it too. Its result is
    part of a graph, its code is not.
    """
    if not args or getattr(function, "__name__", "") not in ("__new__", "__init__"):
        return False
    return issubclass(args[0] if isinstance(args[0], type) else type(args[0]), torch.Tensor)


def is_disabled_by_torch(function: object) -> bool:
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


# -------------------------------------------------------------------- Dynamo's tables of functions
# Dynamo makes its tables of functions when it first needs them. Checked on torch 2.13.0.
#
# The tables hold torch's functions by identity. If a second thread makes a table while a capture has replaced some
# functions, the table holds the replacements for the rest of the process: Dynamo would break graphs without need.


_RULES = "torch._dynamo.trace_rules"
_MODULES = (
    _RULES,
    "torch.overrides",
    *(f"torch._dynamo.variables.{name}" for name in ("torch", "builder", "builtin", "functions", "tensor")),
)
_Cache = type(functools.cache(lambda: None))
_tables: dict[str, list[object]] = {}  # the loaded tables, by module
_made: set[int] = set()


def note_tables() -> None:
    """Note the tables made so far; called before functions are replaced."""
    _made.clear()
    for name in _MODULES:
        _made.update(id(table) for table in _tables_of(name) if _is_made(table))


def forget_replacements() -> None:
    """Drop the tables made meanwhile, for Dynamo to make anew; called after functions are restored."""
    for name in _MODULES:
        for table in _tables_of(name):
            if _is_made(table) and id(table) not in _made:
                table.cache_clear()
    by_id: Any = getattr(sys.modules.get(_RULES), "_builtin_function_ids", None)
    if by_id is not None and by_id.function_ids is not None:  # may have the id of a replacement
        by_id.add(id(builtins.print))


def _is_made(table: Any) -> bool:
    return bool(table.cache_info().currsize)


def _tables_of(name: str) -> list[Any]:
    if name in _tables:
        return _tables[name]
    module = sys.modules.get(name)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return []
    owners = (module, *(value for value in list(vars(module).values()) if isinstance(value, type)))
    values = [value for owner in owners for value in list(vars(owner).values())]
    plain = [value.__func__ if isinstance(value, staticmethod | classmethod) else value for value in values]
    _tables[name] = list({id(value): value for value in plain if isinstance(value, _Cache)}.values())
    return _tables[name]


def is_disabled(function: object) -> bool:
    """Whether the program marked a function with `torch.compiler.disable`, or with an equal mark."""
    if not getattr(function, "_torchdynamo_disable", False):
        return False
    inner = getattr(function, "_torchdynamo_orig_callable", None)
    return inner is None or not is_disabled_by_torch(inner)
