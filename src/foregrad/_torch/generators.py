"""Random generators that a function makes or seeds, and operators that draw from generators. Checked on torch 2.11.0,
2.13.0.

While a thread captures, the methods of `torch.Generator` that seed a generator or tell its state are watched on that
thread. The class is immutable for Python code, so its table is written to, and CPython told so. Nothing is learned
from the state of a generator: other threads draw from the default one meanwhile.

The name `torch.Generator` is bound to a class that makes generators and notes them: a generator that a function makes
begins anew in each call. Known weakness: `type(generator) is torch.Generator` is False during a capture.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import UnsupportedSideEffectError
from ..house import is_house_module
from ..locks import Bind
from .engine import default_generator

_SEEDS = (
    "manual_seed",
    "seed",
    "set_state",
    "set_offset",
    "graphsafe_set_state",
    "__setstate__",
)
_TELLS = (
    "initial_seed",
    "get_state",
    "get_offset",
    "graphsafe_get_state",
    "clone_state",
    "__reduce__",
)
_table: dict[str, Any] = gc.get_referents(torch.Generator.__dict__)[0]
_originals: dict[str, Any] = {name: _table[name] for name in (*_SEEDS, *_TELLS) if name in _table}

# Frames between the caller and the generator.
_PASSED_OVER = {__name__, "torch.random", "torch._compile", "torch._dynamo.eval_frame", "contextlib"}
# Functions that read states to restore them, around code that a capture does not run or runs in its own way.
_HARMLESS = {"torch.utils.checkpoint"}


def _address(generator: Any) -> int:
    address: int = generator._cdata
    return address


class MadeGenerators:
    """The generators that a function makes during a capture, with their initial states.

    `drawn_from` gives the generators that recorded operators draw from. C++ hands these out as other Python objects, so
    generators are identified by their address in C++.
    """

    def __init__(self, drawn_from: Callable[[], Iterable[torch.Generator]]) -> None:
        self._drawn_from = drawn_from
        self._states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def note(self, generator: torch.Generator) -> None:
        with torch._C.DisableTorchFunction():
            self._states[_address(generator)] = generator, _originals["get_state"](generator)

    def __contains__(self, generator: Any) -> bool:
        return isinstance(generator, _Original) and _address(generator) in self._states

    def used(self) -> tuple[tuple[torch.Generator, torch.Tensor], ...]:
        """The made generators that operators draw from, with their initial states."""
        drawn = {_address(generator) for generator in self._drawn_from()} if self._states else set()
        return tuple(pair for key, pair in self._states.items() if key in drawn)

    def unknown(self) -> bool:
        """Whether operators draw from a new generator that was not made under the name `torch.Generator`."""
        addresses = {_address(generator) for generator, _ in self._states.values()}
        others = [
            g for g in self._drawn_from() if _address(g) not in addresses and g is not default_generator(g.device)
        ]
        return any(_is_new(generator) for generator in others)

    def allows(self, name: str, generator: torch.Generator) -> bool:
        """Whether this method of the generator has equal results and effects in every call."""
        if generator not in self:
            return False
        is_drawn = any(_address(used) == _address(generator) for used, _ in self.used())
        return name == "initial_seed" or (name == "manual_seed" and not is_drawn)


def _is_new(generator: torch.Generator) -> bool:
    with torch._C.DisableTorchFunction():
        new = _originals["get_state"](_Original(generator.device))
        return bool(torch.equal(_originals["get_state"](generator), new))


_Original = torch.Generator


def _nothing_made() -> MadeGenerators | None:
    return None


_made_by_thread: Callable[[], MadeGenerators | None] = _nothing_made


class _Making(type):
    """The class of `_Generator`: calls make real generators, checks are `torch.Generator`'s."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        generator = _Original(*args, **kwargs)
        generators = _made_by_thread()
        if generators is not None and not _is_asked_by_torch():
            generators.note(generator)
        return generator

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


def _is_asked_by_torch() -> bool:
    return is_house_module(_module(sys._getframe(2)))


def install(bind: Bind, made_by_thread: Callable[[], MadeGenerators | None]) -> None:
    """Watch generators on threads that capture, where `made_by_thread()` is not None."""
    global _made_by_thread
    _made_by_thread = made_by_thread

    def watched(name: str, original: Any) -> Callable[..., Any]:
        def method(self: torch.Generator, *args: Any, **kwargs: Any) -> Any:
            generators = made_by_thread()
            if generators is None:
                return original(self, *args, **kwargs)
            if not generators.allows(name, self):
                _check(name)
            result = original(self, *args, **kwargs)
            if name in _SEEDS and self in generators:
                generators.note(self)
            return result

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
    raise UnsupportedSideEffectError(
        f"{where} seeds a random generator (`Generator.{name}`): a compiled call would not repeat this. Seed before "
        "the call."
        if name in _SEEDS
        else f"{where} reads the state of a random generator (`Generator.{name}`): a compiled call would not repeat "
        "this. Read it before the call, and pass the result."
    )


def _module(frame: Any) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _is_of(module: str, package: str) -> bool:
    return module.partition(".")[0] == package
