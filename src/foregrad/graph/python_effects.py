"""Side effects of a call in Python: writes to items, attributes, cells and sequences, as an ordered list of values.

Each entry has a place (`target`) and the position of its value among the written values. A written value is an output
like any other: its leaves are tensors, numbers and constants. A leaf `Kept` stands for an object from before the call,
which is written itself; a leaf `OfArgument` for a container or object among the call's arguments.
"""

from __future__ import annotations

import dataclasses
from typing import Any


class Kept:
    """A leaf of a written value that is one object in all calls."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Kept(a {type(self.value).__name__} at {id(self.value):#x})"  # the object's own repr is the user's code


@dataclasses.dataclass(frozen=True, slots=True)
class OfArgument:
    """A container or object among the arguments, different in each call: by its number in the tree of the arguments;
    with `attributes`, its `__dict__`. Used as a leaf of a value, and as the target of a write.
    """

    number: int
    cls: type
    attributes: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PythonWrite:
    """A write to `target`, the object itself or an `OfArgument`; `path` is the place for people. `counts`: a number
    replaces a number, or a container replaces one of equal structure.
    """

    target: Any = dataclasses.field(repr=False)  # its own repr is the user's code
    path: str
    counts: bool = dataclasses.field(default=False, kw_only=True)


@dataclasses.dataclass(frozen=True, slots=True)
class SetItem(PythonWrite):
    """An item of a dict, as it is stored: attributes of objects are items of their `__dict__`."""

    key: Any
    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteItem(PythonWrite):
    """An item of a dict is deleted."""

    key: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SetAttribute(PythonWrite):
    """An attribute of a class, or one in a slot."""

    name: str
    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteAttribute(PythonWrite):
    """An attribute of a class, or one in a slot, is deleted."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallMethod(PythonWrite):
    """A call of a container's method without a result, whatever the contents. The container is the target itself or its
    content under `key`, by `kind`: "item", "attribute" or "self".
    """

    kind: str
    key: Any
    name: str
    args: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SetCell(PythonWrite):
    """A variable of an enclosing function is set; None: it is unbound."""

    value: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class SetItems(PythonWrite):
    """The items of a list or deque from `start` on. Negative numbers among `items` are former items: -1 the first."""

    start: int
    items: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AddToSet(PythonWrite):
    """An element is added to a set."""

    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveFromSet(PythonWrite):
    """An element of a set is removed."""

    value: int
