"""What a call leaves behind in Python: writes to items, attributes, cells and sequences, as an ordered list of values.

Each entry says where (`target`) and which of the written values goes there, by its position among these. A written
value is an output like any other: its leaves are tensors, numbers and constants. `Kept` is a leaf that stands for an
object that was there before the call, and is written as that object; `OfArgument` for one that the call is given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = [
    "AddToSet",
    "CallMethod",
    "DeleteAttribute",
    "DeleteItem",
    "Kept",
    "OfArgument",
    "PythonWrite",
    "RemoveFromSet",
    "SetAttribute",
    "SetCell",
    "SetItem",
    "SetItems",
]


class Kept:
    """A leaf of a written value that is one and the same object in each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Kept(a {type(self.value).__name__} at {id(self.value):#x})"  # the object's own repr is the user's code


@dataclasses.dataclass(frozen=True, slots=True)
class OfArgument:
    """A container or object among the arguments, of which each call has its own: the one with this number in the tree
    of the arguments, or with `attributes` its `__dict__`. As a leaf of a value, and as the target of a write.
    """

    number: int
    cls: type
    attributes: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PythonWrite:
    """A write to `target`, the object itself or an `OfArgument`; `path` is what people call the place. `counts`: a
    number takes another one's place, or a container that of one of the same structure.
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
    """An item of a dict goes."""

    key: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SetAttribute(PythonWrite):
    """An attribute of a class, or one in a slot."""

    name: str
    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteAttribute(PythonWrite):
    """An attribute of a class, or one in a slot, goes."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallMethod(PythonWrite):
    """A method of a container that gives nothing, whatever is in it. It is the target, or what that has under `key`,
    as `kind` says: "item", "cell" or "self".
    """

    kind: str
    key: Any
    name: str
    args: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SetCell(PythonWrite):
    """A variable of an enclosing function; None: it is unbound."""

    value: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class SetItems(PythonWrite):
    """The items of a list or deque from `start` on. Negative numbers among `items` are former items: -1 the first."""

    start: int
    items: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AddToSet(PythonWrite):
    """One more element of a set."""

    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveFromSet(PythonWrite):
    """An element of a set goes."""

    value: int
