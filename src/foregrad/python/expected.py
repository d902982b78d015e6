"""The value of a place that a function looked at, in a form that a later look can be compared with.

Plain values by type and value, tensors by their being tensors, methods by object and function (each look makes a new
method), sets by their items, anything else by identity, without keeping it alive.
"""

from __future__ import annotations

import collections
import re
import types
from typing import Any

import torch

from ..frontend.source import ABSENT, reference
from ..frontend.values import describe, is_plain, same_value
from ..graph.source import a_name


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
    if cls is types.BuiltinMethodType:  # functions of extensions have this type too
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


_ADDRESS = re.compile(r" \(at 0x[0-9a-f]+\)")


def apart(before: str, now: str) -> tuple[str, str]:
    """Two texts that `describe` gave, without addresses."""
    short = _ADDRESS.sub("", before), _ADDRESS.sub("", now)
    return (short[0], "another object") if short[0] == short[1] else short
