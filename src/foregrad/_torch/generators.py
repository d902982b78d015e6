"""Random generators: who seeds one, and operators that draw from another. Checked on torch 2.11.0, 2.13.0.

While a thread captures, the methods of `torch.Generator` that seed a generator or tell its state are watched on that
thread. The class is immutable for Python code, so its table is written to, and CPython told so. Nothing is learned
from the state of a generator: other threads draw from the default one meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedSideEffectError

__all__ = ["drawing_from", "install", "remove"]

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

# Frames between who asks and the generator.
_PASSED_OVER = {__name__, "torch.random", "torch._compile", "torch._dynamo.eval_frame", "contextlib"}
# What asks for states to put them back around what a capture does not run, or does in its own way.
_HARMLESS = {"torch.utils.checkpoint"}


def install(is_capturing: Callable[[], bool]) -> None:
    """Watch, on threads on which `is_capturing()` says so."""

    def watched(name: str, original: Any) -> Callable[..., Any]:
        def method(self: torch.Generator, *args: Any, **kwargs: Any) -> Any:
            if is_capturing():
                _check(name)
            return original(self, *args, **kwargs)

        method.__name__ = name
        return method

    for name, original in _originals.items():
        _table[name] = watched(name, original)
    _changed()


def remove() -> None:
    """Put torch's own back."""
    _table.update(_originals)
    _changed()


def _changed() -> None:
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Generator))


def _check(name: str) -> None:
    """Raise where the function that is captured asks; PyTorch itself may read what it likes."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _PASSED_OVER:
        frame = frame.f_back
    module = _module(frame)
    if _is_of(module, "foregrad") or module in _HARMLESS or (_is_of(module, "torch") and name in _TELLS):
        return
    while frame is not None and (_is_of(_module(frame), "torch") or _module(frame) == "contextlib"):
        if _module(frame).startswith("torch._dynamo."):
            return  # which puts back what it found, round each function that it looks into
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "the function"
    raise UnsupportedSideEffectError(
        f"{where} seeds a random generator (`Generator.{name}`), which a compiled call would not repeat. Seed before "
        "the call instead."
        if name in _SEEDS
        else f"{where} asks for the state of a random generator (`Generator.{name}`), which a compiled call would not "
        "do again. Ask before the call, and pass what it says."
    )


def _module(frame: Any) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _is_of(module: str, package: str) -> bool:
    return module.partition(".")[0] == package


# ------------------------------------------------------------------------------------ drawing from another generator


def drawing_from(op: Any, generator: torch.Generator) -> Callable[..., Any] | None:
    """The random operator `op` as a function of the same arguments that draws from `generator`; None: there is none."""
    if _takes_generator(op):
        return lambda *args, **kwargs: op(*args[: _position(op)], **{**kwargs, "generator": generator})
    wanted = _signature(op)
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        if _takes_generator(other) and [a for a in _signature(other) if a[0] != "generator"] == wanted:
            return lambda *args, **kwargs: other(*args, **kwargs, generator=generator)
    if op is torch.ops.aten.native_dropout.default and generator.device.type == "cpu":
        return lambda source, p, train: _native_dropout(source, p, train, generator)
    return None


def _takes_generator(op: Any) -> bool:
    return any(argument.name == "generator" for argument in op._schema.arguments)


def _position(op: Any) -> int:
    """Where the generator is among the arguments: after it come those by keyword only."""
    return next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "generator")


def _signature(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _native_dropout(
    source: torch.Tensor, p: float, train: bool | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    kept = torch.empty(source.shape, dtype=torch.bool, device=source.device).bernoulli_(1 - p, generator=generator)
    return source * kept * (0.0 if p == 1 else 1 / (1 - p)), kept
