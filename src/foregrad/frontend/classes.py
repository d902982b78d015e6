"""What a class holds itself: methods, special ones, slots, options; the functions that a module holds."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "CODE_OF_CLASSES",
    "MAKERS",
    "called_by_autograd",
    "dict_of_class",
    "functions_held_by",
    "is_method",
    "is_slot",
    "makers_of",
    "special_names",
    "values_of",
]

_MOST_HELD = 100  # items of a container that are looked at
_CALLED_BY_AUTOGRAD = {"forward", "backward", "setup_context", "jvp", "vmap"}
MAKERS = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__setstate__", "__del__"}
CODE_OF_CLASSES = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    types.FunctionType,
)


def special_names(cls: type) -> list[str]:
    """Methods that no code has to name to run them."""
    return [name for name in cls.__dict__ if name.startswith("__") and name not in MAKERS]


def is_method(cls: type, name: str) -> bool:
    """Whether it is an ordinary method, which runs only where code names it."""
    return isinstance(cls.__dict__[name], types.FunctionType) and not name.startswith("__")


def values_of(cls: type) -> set[str]:
    """The options that a class itself holds: neither its code nor what describes it."""
    return {
        name
        for name, value in cls.__dict__.items()
        if not (name.startswith("__") or isinstance(value, CODE_OF_CLASSES) or hasattr(type(value), "__get__"))
    }


def is_slot(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), types.MemberDescriptorType)


def functions_held_by(module: Any) -> Iterator[types.FunctionType]:
    """The functions among a module's own attributes, and in lists, tuples and dicts there; PyTorch's apart."""
    for held in list(object.__getattribute__(module, "__dict__").values()):
        cls = type(held)
        values = list(held.values()) if cls is dict else held if cls in (list, tuple) else (held,)
        for value in values[:_MOST_HELD]:
            # By the type: `isinstance` asks modules for their class, each of which answers slowly.
            while (cls := type(value)) is types.MethodType or issubclass(cls, functools.partial):
                value = value.__func__ if cls is types.MethodType else value.func
            if cls is types.FunctionType and str(value.__module__).partition(".")[0] != "torch":
                yield value


def makers_of(cls: type) -> set[str]:
    """The methods that a class defines itself and that run when it is called, or when autograd calls it."""
    makers = MAKERS | _CALLED_BY_AUTOGRAD if issubclass(cls, torch.autograd.Function) else MAKERS
    return makers & cls.__dict__.keys()


def called_by_autograd(functions: Iterable[Any]) -> Iterator[types.FunctionType]:
    """The functions that autograd calls of custom Functions."""
    for cls in functions:
        found = (getattr(cls, name, None) for name in _CALLED_BY_AUTOGRAD)
        yield from (function for function in found if isinstance(function, types.FunctionType))


def dict_of_class(cls: type) -> Any:
    """The dict of which `vars(cls)` is a view, and whose writes CPython counts."""
    return gc.get_referents(type.__dict__["__dict__"].__get__(cls))[0]
