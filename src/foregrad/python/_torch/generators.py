"""Random generators made, seeded or asked by a function are refused. Checked on torch 2.11.0, 2.13.0.

While a thread captures, the methods of `torch.Generator` for seeds and states are watched on the thread. The class is
immutable for Python code, so its table is written to, and CPython told so. Nothing is learned from the state of a
generator: other threads draw from the default one meanwhile.

The name `torch.Generator` is bound to a class whose calls are refused, too. Known weakness: `type(generator) is
torch.Generator` is False during a capture.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._torch.engine import default_generator
from ...errors import UnsupportedSideEffectError
from ...house import is_house_module
from ...locks import Bind

_SEEDS = ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state", "__setstate__")
_TELLS = ("initial_seed", "get_state", "get_offset", "graphsafe_get_state", "clone_state", "__reduce__")
_SAID = (
    dict.fromkeys(_SEEDS, ("seeds", "Seed before the call."))
    | dict.fromkeys(_TELLS, ("reads the state of", "Read it before the call, and pass the result."))
    | {"__init__": ("makes", "Make it before the call.")}
)
_table: dict[str, Any] = gc.get_referents(torch.Generator.__dict__)[0]
_originals: dict[str, Any] = {name: _table[name] for name in (*_SEEDS, *_TELLS) if name in _table}

# Frames between the caller and the generator.
_PASSED_OVER = {__name__, "torch.random", "torch._compile", "torch._dynamo.eval_frame", "contextlib"}
# Functions that read states to restore them, around code that a capture does not run or runs in its own way.
_HARMLESS = {"torch.utils.checkpoint"}


def are_new(generators: Iterable[torch.Generator]) -> bool:
    """Whether a generator, the default generators apart, has the state of a new generator."""
    return any(_is_new(generator) for generator in generators if generator is not default_generator(generator.device))


def _is_new(generator: torch.Generator) -> bool:
    with torch._C.DisableTorchFunction():
        new = _originals["get_state"](_Original(generator.device))
        return bool(torch.equal(_originals["get_state"](generator), new))


_Original = torch.Generator


_is_capturing: Callable[[], bool] = bool


class _Making(type):
    """The class of `_Generator`: calls make real generators, checks are `torch.Generator`'s."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if _is_capturing():
            _check("__init__")
        return _Original(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Original, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Original

    def __hash__(cls) -> int:
        return hash(_Original)


class _Generator(metaclass=_Making):
    pass


def asked_class() -> type:
    """The class that the name `torch.Generator` is bound to during a capture."""
    return _Generator


def install(bind: Bind, is_capturing: Callable[[], bool]) -> None:
    """Watch generators on threads that capture."""
    global _is_capturing
    _is_capturing = is_capturing

    def watched(name: str, original: Any) -> Callable[..., Any]:
        def method(self: torch.Generator, *args: Any, **kwargs: Any) -> Any:
            if is_capturing():
                _check(name)
            return original(self, *args, **kwargs)

        method.__name__ = name
        return method

    methods = {name: watched(name, original) for name, original in _originals.items()}
    before = dict(_table)  # other threads may find these methods in the type's cache until it knows of the change
    _table.update(methods)
    _changed()
    del before
    bind(torch, "Generator", _Generator)
    bind(torch._C, "Generator", _Generator)


def restore_methods() -> None:
    """Restore the methods of generators that `install` replaced."""
    before = dict(_table)  # as in `install`
    _table.update(_originals)
    _changed()
    del before


def _changed() -> None:
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(_Original))


def _check(name: str) -> None:
    """Raise `UnsupportedSideEffectError` if the captured function is the caller; PyTorch's own code may call."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _PASSED_OVER:
        frame = frame.f_back
    module = _module(frame)
    if is_house_module(module) or module in _HARMLESS or (_is_of(module, "torch") and name in _TELLS):
        return
    while frame is not None and (_is_of(_module(frame), "torch") or _module(frame) == "contextlib"):
        if _module(frame).startswith("torch._dynamo."):
            return  # restores the state around each function that it traces
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "the function"
    done, advice = _SAID[name]
    raise UnsupportedSideEffectError(
        f"{where} {done} a random generator (`Generator.{name}`): a compiled call would not repeat this. {advice}"
    )


def _module(frame: Any) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _is_of(module: str, package: str) -> bool:
    return module.partition(".")[0] == package
