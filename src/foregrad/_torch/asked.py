"""Replacements for functions and classes of PyTorch's that would tell the user's code a capture from a call.

For the time of a capture their names are bound to replacements, in the modules of PyTorch where they are looked up and
in the modules whose code runs. The replacements answer as for the tensor; PyTorch's own code has the originals.
Checked on torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..locks import make_lock
from . import generators

__all__ = ["ReboundNames", "ViewReplay", "install", "is_capturing", "rebind", "remove"]

_C: Any = torch._C
_capturing: Callable[[], bool] = bool


def is_capturing() -> bool:
    """Whether this thread runs a function to capture it. Questions on other threads get PyTorch's answers."""
    return _capturing()


def _is_asked(frames: int = 2) -> bool:
    """Whether the caller is the user's code, on a thread that captures."""
    asker = str(sys._getframe(frames).f_globals.get("__name__")).partition(".")[0]
    return _capturing() and asker not in ("torch", "foregrad")


def _has_torch_function(relevant: Iterable[Any]) -> bool:
    return _any_overrides(relevant) if _is_asked() else bool(_C._has_torch_function(relevant))


def _has_torch_function_unary(value: Any) -> bool:
    return _any_overrides((value,)) if _is_asked() else bool(_C._has_torch_function_unary(value))


def _has_torch_function_variadic(*values: Any) -> bool:
    return _any_overrides(values) if _is_asked() else bool(_C._has_torch_function_variadic(*values))


def _any_overrides(values: Iterable[Any]) -> bool:
    """Whether a value overrides PyTorch's functions; the capture's own mode does not count."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(type(value) not in plain and hasattr(type(value), "__torch_function__") for value in values)


class ViewReplay:
    """Context of a capture with a view-replay setting of its own, which the function sets and reads."""

    def __init__(self) -> None:
        with _C.DisableTorchFunction():
            self.before = self.now = bool(_replays_views())

    def __enter__(self) -> ViewReplay:
        self._before, _thread.view_replay = getattr(_thread, "view_replay", None), self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.view_replay = self._before


_thread = threading.local()
_replays_views, _set_view_replay = _C._is_view_replay_enabled, _C._set_view_replay_enabled


def _is_view_replay_enabled() -> bool:
    asked: ViewReplay | None = getattr(_thread, "view_replay", None)
    if asked is not None:
        return asked.now
    with _C.DisableTorchFunction():  # a mode would call this function again
        return bool(_replays_views())


def _set_view_replay_enabled(on: bool) -> None:
    asked: ViewReplay | None = getattr(_thread, "view_replay", None)
    if asked is not None:
        asked.now = bool(on)
        return
    with _C.DisableTorchFunction():
        _set_view_replay(on)


_engine_runs = _C._will_engine_execute_node


@functools.wraps(_engine_runs)
def _will_engine_execute_node(node: Any) -> bool:
    """Asked by hooks of several tensors. For a leaf in `inputs=` of `autograd.grad` PyTorch raises: then True."""
    if _capturing() and type(node).__name__ == "AccumulateGrad":
        with contextlib.suppress(RuntimeError):
            return bool(_engine_runs(node))
        return True
    return bool(_engine_runs(node))


_no_functions, _no_subclasses = _C.DisableTorchFunction, _C.DisableTorchFunctionSubclass


class _NoFunctions:
    """`torch._C.DisableTorchFunction` of the user's code: the capture's mode stays on."""

    def __new__(cls) -> Any:
        return _no_subclasses() if _is_asked() else _no_functions()


@functools.wraps(_C._to_dlpack)
def _to_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if _capturing() and isinstance(tensor, torch.Tensor):
        tensor.__dlpack__()  # refused for stand-ins
    return _C._to_dlpack(tensor, *args, **kwargs)


_text_of_size = torch.SymInt.__repr__
_WRITES_NO_TEXT = ("torch", "foregrad", "sympy", "logging")
_PRINTS = "foregrad.graph.console"  # for the program


def _text_of_number(self: Any) -> str:
    """The text of a symbolic size is the text of its number; the graph is then right for this number alone."""
    asker = str(sys._getframe(1).f_globals.get("__name__"))
    is_told = _capturing() and (asker.partition(".")[0] not in _WRITES_NO_TEXT or asker == _PRINTS)
    return repr(int(self)) if is_told else _text_of_size(self)


# (a module or class, a name in it, the replacement)
_Place = tuple[Any, str, Any]
_PLACES: list[_Place] = [
    (torch.overrides, "has_torch_function", _has_torch_function),
    (torch.overrides, "has_torch_function_unary", _has_torch_function_unary),
    (torch.overrides, "has_torch_function_variadic", _has_torch_function_variadic),
    (_C, "_is_view_replay_enabled", _is_view_replay_enabled),
    (_C, "_set_view_replay_enabled", _set_view_replay_enabled),
    (_C, "_will_engine_execute_node", _will_engine_execute_node),
    (_C, "DisableTorchFunction", _NoFunctions),
    (torch.SymInt, "__repr__", _text_of_number),
    (torch, "to_dlpack", _to_dlpack),
    (torch.utils.dlpack, "to_dlpack", _to_dlpack),
]
_originals = [(module, name, getattr(module, name)) for module, name, _ in _PLACES]
# By the id of the original.
_REPLACED: dict[int, Any] = {
    id(original): replacement for (_, _, original), (_, _, replacement) in zip(_originals, _PLACES, strict=True)
} | {id(torch.Generator): generators.asked_class()}


def rebind(functions: Mapping[Any, Any]) -> None:
    """Replace further functions, under the names that the user's code has for them."""
    _REPLACED.update((id(original), replacement) for original, replacement in functions.items())


def install(is_capturing: Callable[[], bool]) -> None:
    """Bind the names in PyTorch's modules."""
    global _capturing
    _capturing = is_capturing
    for module, name, replacement in _PLACES:
        setattr(module, name, replacement)


def remove() -> None:
    """Restore torch's own."""
    for module, name, original in _originals:
        setattr(module, name, original)


_lock = make_lock()
_bound: dict[tuple[int, str], tuple[dict[str, Any], Any, Any, int]] = {}  # namespace, original, other, captures


class ReboundNames:
    """The names in the user's modules that one capture has bound to replacements."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, str]] = []

    def bind(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        """Bind replacements in a namespace, for code that may run and loads `names`."""
        for name in names:
            key = id(namespace), name
            if id(namespace.get(name)) not in _REPLACED and key not in _bound:
                continue
            with _lock:
                replacement = _REPLACED.get(id(namespace.get(name)))
                if key in _bound:
                    held, original, other, count = _bound[key]
                elif replacement is not None:
                    held, original, other, count = namespace, namespace[name], replacement, 0
                    namespace[name] = other
                else:
                    continue
                _bound[key] = held, original, other, count + 1
                self._keys.append(key)

    def unbind(self) -> None:
        while self._keys:
            key = self._keys.pop()
            with _lock:
                namespace, original, other, count = _bound.pop(key)
                if count > 1:
                    _bound[key] = namespace, original, other, count - 1
                elif namespace.get(key[1]) is other:
                    namespace[key[1]] = original
