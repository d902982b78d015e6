"""Replacements for functions and classes of PyTorch's that would tell the user's code a capture from a call.

For the time of a capture their names are bound to replacements, in PyTorch's modules that look the names up and in the
modules with code that runs. The replacements answer as for the tensor; PyTorch's own code has the originals. Libraries
ask whether they are traced to avoid branches on values. A capture follows branches on values, so the answer is no, and
the libraries run as in eager. Checked on torch 2.13.0.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.symbols import TracedInt
from ...house import is_house_module, is_program_module
from ...locks import Bind, make_lock
from . import generators

_C: Any = torch._C
_capturing: Callable[[], bool] = bool


def is_capturing() -> bool:
    """Whether this thread runs a function to capture it. Questions on other threads get PyTorch's answers."""
    return _capturing()


def is_asked(frames: int = 2) -> bool:
    """Whether the caller is the user's code, on a thread that captures."""
    return _capturing() and is_program_module(sys._getframe(frames).f_globals.get("__name__"))


def _has_torch_function(relevant: Iterable[Any]) -> bool:
    return _any_overrides(relevant) if is_asked() else bool(_C._has_torch_function(relevant))


def _has_torch_function_unary(value: Any) -> bool:
    return _any_overrides((value,)) if is_asked() else bool(_C._has_torch_function_unary(value))


def _has_torch_function_variadic(*values: Any) -> bool:
    return _any_overrides(values) if is_asked() else bool(_C._has_torch_function_variadic(*values))


def _any_overrides(values: Iterable[Any]) -> bool:
    """Whether a value overrides PyTorch's functions; the capture's own mode does not count."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(type(value) not in plain and hasattr(type(value), "__torch_function__") for value in values)


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
        return _no_subclasses() if is_asked() else _no_functions()


_text_of_size = torch.SymInt.__repr__
_WRITES_NO_TEXT = ("torch", "sympy", "logging")
_PRINTS = "foregrad.python.effects"  # for the program


def _text_of_number(self: Any) -> str:
    """The text of a symbolic size is the text of its number; the graph is then right for this number alone."""
    return repr(int(self)) if _capturing() and _writes_text(sys._getframe(1)) else _text_of_size(self)


def _writes_text(frame: types.FrameType) -> bool:
    """Whether code writes text for the program: PyTorch's public code does, in warnings; PyTorch's private modules and
    `torch.fx` work with symbols.
    """
    asker = str(frame.f_globals.get("__name__"))
    is_called = asker.startswith("torch.") and "._" not in asker and not asker.startswith("torch.fx")
    is_quiet = is_house_module(asker) or asker.partition(".")[0] in _WRITES_NO_TEXT
    return is_called or asker == _PRINTS or not is_quiet


_text_of_tensor = torch._tensor_str._str
_FINDS_OVERLOAD = torch._ops.OpOverloadPacket.__call__.__code__


def _text_of_argument(self: Any, **kwargs: Any) -> str:
    """PyTorch writes why an overload does not fit, with the text of each argument, before it tries the next one. A
    stand-in has no values to write.
    """
    if _capturing() and sys._getframe(2).f_code is _FINDS_OVERLOAD and is_stand_in(self):
        return "tensor(...)"
    return str(_text_of_tensor(self, **kwargs))


def _listing(function: Callable[..., Any]) -> Any:
    """A function of items that lists a generator's: of numbers of a capture it is one operation then."""

    @functools.wraps(function)
    def listing(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is types.GeneratorType and is_asked():
            args = [*args[0]], *args[1:]
        return function(*args, **kwargs)

    return listing


def _length(value: Any) -> Any:
    """Python's `len`, where code that runs asks a tensor or a container's stand-in: its answer may be symbolic."""
    if (answer := _lengths.get(type(value))) is not None and is_asked():
        return answer(value)
    if is_asked() and isinstance(value, torch.Tensor) and value.dim():
        size: Any = value.shape[0]
        return TracedInt(size.node) if type(size) is torch.SymInt else size
    return len(value)


# (a module or class, a name there, the replacement)
_Place = tuple[Any, str, Any]
_PLACES: list[_Place] = [
    (torch.overrides, "has_torch_function", _has_torch_function),
    (torch.overrides, "has_torch_function_unary", _has_torch_function_unary),
    (torch.overrides, "has_torch_function_variadic", _has_torch_function_variadic),
    (_C, "_will_engine_execute_node", _will_engine_execute_node),
    (_C, "DisableTorchFunction", _NoFunctions),
    (torch.SymInt, "__repr__", _text_of_number),
    (torch._tensor_str, "_str", _text_of_argument),
]
# By the id of the original.
_REPLACED: dict[int, Any] = {id(getattr(module, name)): replacement for module, name, replacement in _PLACES}
_REPLACED[id(torch.Generator)] = generators.asked_class()


def install(bind: Bind, is_capturing: Callable[[], bool]) -> None:
    """Bind the names in PyTorch's modules."""
    global _capturing
    _capturing = is_capturing
    for module, name, replacement in _PLACES:
        bind(module, name, replacement)


def tell(name: str, replacement: Any) -> None:
    """Have a built-in of Python's replaced in modules with running code and no object of the built-in's name."""
    _BUILTINS[name] = replacement


_ABSENT = object()
_BUILTINS: dict[str, Any] = {}
_lock = make_lock()
_bound: dict[tuple[int, str], tuple[dict[str, Any], Any, Any, int]] = {}  # namespace, original, replacement, captures


def own_names(namespace: dict[str, Any]) -> dict[str, Any]:
    """A module's globals without the built-ins that a capture has bound there."""
    return {name: value for name, value in namespace.items() if name not in _BUILTINS or value is not _BUILTINS[name]}


class ReboundNames:
    """Context of one capture: it binds names to replacements in the modules with code that runs."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, str]] = []

    def __enter__(self) -> ReboundNames:
        return self

    def __exit__(self, *_: object) -> None:
        self._unbind(self._keys)

    def unbind(self) -> None:
        """The function has returned: restore the names that modules had themselves. Built-ins follow at the end."""
        self._unbind([key for key in self._keys if _bound[key][1] is not _ABSENT])

    def runs(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Bind replacements for code that has these globals and begins to run."""
        for name in code.co_names:
            key, original = (id(namespace), name), namespace.get(name, _ABSENT)
            replacement = _REPLACED.get(id(original))
            if original is _ABSENT and name in _BUILTINS and _is_builtin(namespace, name):
                replacement = _BUILTINS[name]
            if (replacement is None and key not in _bound) or key in self._keys:
                continue
            with _lock:
                if key not in _bound:
                    namespace[name] = replacement
                    _bound[key] = namespace, original, replacement, 0
                held, original, other, count = _bound[key]
                _bound[key] = held, original, other, count + 1
                self._keys.append(key)

    def _unbind(self, keys: list[tuple[int, str]]) -> None:
        self._keys = [key for key in self._keys if key not in keys]
        for key in keys:
            with _lock:
                namespace, original, other, count = _bound.pop(key)
                if count > 1:
                    _bound[key] = namespace, original, other, count - 1
                elif namespace.get(key[1]) is other:
                    if original is _ABSENT:
                        del namespace[key[1]]
                    else:
                        namespace[key[1]] = original


def _is_builtin(namespace: dict[str, Any], name: str) -> bool:
    """Whether code with the globals `namespace` finds Python's own under the name."""
    own: Any = getattr(builtins, name)
    return getattr(namespace.get("__builtins__"), name, own) is own


# -------------------------------------------------------------------- types
# The answer to `type(x)` in the user's code for stand-ins of arrays, generators, iterators and containers.
#
# Stand-ins of tensors are of the tensors' own type. Stand-ins of other objects are not, and no object can answer
# `type(x)` for itself. So in a module whose code calls `type`, the name `type` in its globals is bound during a
# capture to a class that answers the type of the object behind a stand-in, and is like `type` otherwise.
#
# Known weakness: in a module that also calls `type`, `C is type` is False during a capture if `C` comes from anything
# but `type(...)` or that name: `x.__class__`, a default, another module. `==` is right.


class _AsType(type):
    """The class of `_Type`: its calls and checks are `type`'s."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs:
            kind = type(args[0])
            if kind is type or kind is _AsType:
                return _Type  # the object that the calling code finds under that name
            answer = _answers.get(kind)
            return kind if answer is None or not is_capturing() else answer(args[0])
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type if cls is _Type else cls)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type) if cls is _Type else super().__subclasscheck__(subclass)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is _Type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _Type else super().__hash__()

    def __repr__(cls) -> str:
        return repr(type) if cls is _Type else super().__repr__()

    def __getitem__(cls, item: Any) -> Any:
        return type[item] if cls is _Type else super().__class_getitem__(item)  # type: ignore[misc]

    def __or__(cls, other: Any) -> Any:
        return type | other if cls is _Type else super().__or__(other)

    def __ror__(cls, other: Any) -> Any:
        return other | type if cls is _Type else super().__ror__(other)


class _Type(type, metaclass=_AsType):
    pass


_Type.__name__ = _Type.__qualname__ = type.__name__
_Type.__module__ = type.__module__

_answers: dict[type, Callable[[Any], type]] = {}
tell("type", _Type)
tell("len", _length)
for _function in (sum, min, max):
    tell(_function.__name__, _listing(_function))


_lengths: dict[type, Callable[[Any], Any]] = {}


def tell_length(kind: type, answer: Callable[[Any], Any]) -> None:
    """Register the answer to `len(x)` in the user's code for stand-ins of the kind."""
    _lengths[kind] = answer


def tell_type(kind: type, answer: Callable[[Any], type]) -> None:
    """Register the answer to `type(x)` in the user's code for stand-ins of the kind."""
    _answers[kind] = answer
