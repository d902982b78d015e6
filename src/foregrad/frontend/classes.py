"""The parts of a class: methods, special methods, slots, options."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..graph.spelling import in_order

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


_LIKE: Any = (int, complex, list, set, type, types.FunctionType, type(iter(())), os.PathLike, contextlib.nullcontext)
# Special methods, without which the interpreter does something else.
SPECIAL = frozenset(
    name
    for kind in _LIKE
    for base in kind.__mro__
    for name, item in vars(base).items()
    if name[:2] == "__" and callable(item)
) | {"__getattr__", "__matmul__", "__rmatmul__", "__match_args__"}


def special_names(cls: type) -> list[str]:
    """Methods that no code has to name to run them."""
    return [name for name in cls.__dict__ if name.startswith("__") and name not in MAKERS]


def values_of(cls: type) -> set[str]:
    """The options that a class itself holds: neither its code nor what describes it."""
    return {
        name
        for name, value in cls.__dict__.items()
        if not (name.startswith("__") or isinstance(value, CODE_OF_CLASSES) or hasattr(type(value), "__get__"))
    }


def attributes_of(cls: type) -> frozenset[str]:
    """The names that a class and those it inherits from define."""
    return frozenset().union(*(base.__dict__ for base in cls.__mro__))


def slots_in(cls: type) -> frozenset[str]:
    """The slots of objects of a class, found without a `getattr`, which runs the program's own descriptors."""
    items: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        items |= base.__dict__
    return frozenset(name for name, item in items.items() if isinstance(item, types.MemberDescriptorType))


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


def kept_by_c(cls: type) -> list[str]:
    """The attributes of a class of exceptions that C keeps, the traceback apart."""
    kinds = types.MemberDescriptorType, types.GetSetDescriptorType
    found = {name for base in cls.__mro__ for name, item in vars(base).items() if isinstance(item, kinds)}
    return in_order(frozenset(found - {"__dict__", "__weakref__", "__traceback__"}))
