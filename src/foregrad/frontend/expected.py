"""The value of a place that a function looked at, in a form that a later look can be compared with.

Plain values by type and value, tensors by their being tensors, methods by object and function (each look makes a new
method), sets by their items, anything else by identity, without keeping it alive.
"""

from __future__ import annotations

import collections
import math
import operator
import re
import types
import weakref
from typing import Any

import torch

from ..graph.source import a_name, key_text
from ..house import file_label
from .arrays import is_number_of_numpy
from .source import ABSENT, reference

PLAIN = {int, float, str, bool, bytes, complex, type(None), type(...), range, slice}
PLAIN |= {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}

_NOT_PLAIN = {types.FunctionType, types.ModuleType, type, list, dict, set}  # what is met most often, told at once


class Expected:
    """The value of a place: `holds(now)` says whether a later look sees an equal value."""

    __slots__ = ("kind", "pinned", "text", "value")

    def __init__(self, value: Any) -> None:
        self.value: Any
        self.pinned: Any = None
        if value is ABSENT:
            self.kind, self.value = "absent", None
        elif issubclass(type(value), torch.Tensor):
            self.kind, self.value, self.pinned = "tensor", type(value), value
        elif is_plain(value):
            self.kind, self.value = "equal", value
        elif is_bound(value):
            self.kind, self.value = "bound", _Bound(value)
        elif type(value) is frozenset:
            self.kind, self.value = "members", {id(item): reference(item) for item in value}
        else:
            self.kind, self.value = "same", reference(value)
        self.text = None if self.kind == "equal" else describe(value)

    @classmethod
    def of_type(cls, value: Any) -> Expected:
        """Any container of the value's type, with any contents."""
        expected = cls(None)
        expected.kind, expected.value, expected.pinned = "type", type(value), value
        expected.text = a_name(type(value).__name__)
        return expected

    def holds(self, now: Any) -> bool:
        if self.kind == "equal":
            return same_value(self.value, now)
        if self.kind == "same":
            return now is not None and self.value() is now
        if self.kind in ("tensor", "type"):
            return type(now) is self.value
        if self.kind == "bound":
            return bool(self.value.is_like(now))
        if self.kind == "members":
            same = type(now) is frozenset and len(now) == len(self.value)
            return same and all(id(item) in self.value and self.value[id(item)]() is item for item in now)
        return now is ABSENT

    def before(self) -> Any:
        """The value itself, while the capture lasts."""
        if self.kind == "absent":
            return ABSENT
        if self.kind == "members":
            return frozenset(get() for get in self.value.values())
        return self.pinned if self.kind in ("tensor", "type") else self.value if self.kind == "equal" else self.value()

    def pin(self, now: Any) -> None:
        """Keep the plain object found now: it is compared by identity."""
        if self.kind == "equal":
            self.pinned = now

    def describe(self) -> str:
        return self.text if self.text is not None else describe(self.value)


def is_bound(value: Any) -> bool:
    """Whether a value is a bound method; each look at its object may make a new one."""
    cls = type(value)
    if cls is types.BuiltinMethodType:  # functions of extensions are of this type too
        return hasattr(type(value.__self__), value.__name__) and not isinstance(
            value.__self__, (type, types.ModuleType)
        )
    return cls is types.MethodType or cls is types.MethodWrapperType


class _Bound:
    """A bound method: a weak reference to its object, and its function."""

    __slots__ = ("function", "owner")

    def __init__(self, method: Any) -> None:
        self.owner = reference(method.__self__)
        self.function = method.__func__ if type(method) is types.MethodType else method.__name__

    def __call__(self) -> Any:
        owner = self.owner()
        if owner is None:
            return None
        if isinstance(self.function, str):
            return getattr(owner, self.function)
        return types.MethodType(self.function, owner)

    def is_like(self, now: Any) -> bool:
        if not is_bound(now) or now.__self__ is not self.owner():
            return False
        if isinstance(self.function, str):
            return type(now) is not types.MethodType and now.__name__ == self.function
        return type(now) is types.MethodType and now.__func__ is self.function


def stored(container: Any) -> list[Any]:
    """The items of a list, tuple, set or deque as stored, past the methods of a subclass."""
    if type(container) is tuple or type(container) is list:
        return list(container)
    kinds = (list, tuple, set, frozenset, collections.deque)
    kind: Any = next(kind for kind in kinds if isinstance(container, kind))
    return list(kind.__iter__(container))


def is_plain(value: Any) -> bool:
    """Whether a value is immutable and compared by value, not by identity."""
    cls = type(value)
    if cls in PLAIN:
        return True
    if cls in _NOT_PLAIN:
        return False
    if cls is tuple or cls is frozenset:
        return all(isinstance(item, type) or is_plain(item) for item in value)
    return is_number_of_numpy(value)


def holds_classes(value: Any) -> bool:
    """Whether a value is a tuple of classes and the like: plain, but for the code in there."""
    return type(value) in (tuple, frozenset) and any(isinstance(x, type) or holds_classes(x) for x in value)


def same_value(a: Any, b: Any) -> bool:
    """Equal, of the same type, down to the items of tuples; NaN is NaN; -NaN is not NaN, -0.0 is not 0.0. Tensors, and
    weak references to tensors, are compared by identity.
    """
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (type, torch.Tensor, weakref.ref)):
        return False
    if type(a) is float:
        return math.copysign(1.0, a) == math.copysign(1.0, b) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if type(a) is complex:
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if type(a) is frozenset:
        if a != b:
            return False
        kinds = {*map(type, a)}
        of_one_type = len(kinds) < 2 and kinds == {*map(type, b)}
        return of_one_type or {(type(x), x) for x in a} == {(type(x), x) for x in b}
    if is_number_of_numpy(a):
        return bool(a.tobytes() == b.tobytes())
    if type(a) is range:  # ranges are equal by their items, whatever they were made of
        return (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    if type(a) is slice:
        return same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def same_keys(keys: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether they are equal, and of the same types: True is no 1. A tensor is a key by identity."""
    return len(keys) == len(others) and (all(map(operator.is_, keys, others)) or all(map(same_value, keys, others)))


_ADDRESS = re.compile(r" \(at 0x[0-9a-f]+\)")


def apart(before: str, now: str) -> tuple[str, str]:
    """Two texts that `describe` gave, with addresses where nothing else tells them apart."""
    short = _ADDRESS.sub("", before), _ADDRESS.sub("", now)
    return (before, now) if short[0] == short[1] else short


def describe(value: Any) -> str:
    """Short text for messages."""
    cls = type(value)  # not `isinstance`, for which modules are asked for their class, and answer slowly
    if issubclass(cls, torch.Tensor):
        return a_name(cls.__name__)
    if issubclass(cls, types.FunctionType):
        code = value.__code__
        return f"{value.__qualname__} of {file_label(code.co_filename)}:{code.co_firstlineno} (at {id(value):#x})"
    if issubclass(cls, type):
        return f"{value.__qualname__} (at {id(value):#x})"
    if not is_plain(value) and value is not ABSENT:
        return f"{a_name(cls.__name__)} (at {id(value):#x})"  # its repr may run code of the user's
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits
        text = key_text(value)
    return text if len(text) <= 80 else text[:77] + "..."
