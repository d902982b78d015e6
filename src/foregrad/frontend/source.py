"""Where a tensor that a function reaches by itself is kept, so that each call gets the tensor anew.

Rebinding anything on the way is noticed, because each call walks the chain of steps again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..graph.slots import Slot
from ..graph.source import attribute, item


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class Strong:
    """Like a weak reference, for values without weak references (lists, dicts, built-in methods)."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __call__(self) -> object:
        return self.value


def reference(value: object) -> Callable[[], Any]:
    """A function that gives the value: a weak reference where the value has one; then None after the value's end."""
    try:
        return weakref.ref(value)
    except TypeError:
        return Strong(value)


def table_of(value: object) -> Any:
    """An object's `__dict__`, without running code of its class; None where it has none."""
    try:
        if isinstance(value, threading.local):  # a table for each thread
            return threading.local.__getattribute__(value, "__dict__")
        return object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None


class Source:
    """How to reach an object: from `root`, by `steps` of ("attr", name), ("item", key), or ("there", key): an item of a
    table that makes items for missing keys (a `defaultdict`), None for a missing key.

    A root that can be referred to weakly is not kept alive, unless it is a tensor: one that nothing leads to is read
    from here alone.
    """

    __slots__ = ("_root", "slot", "steps")

    def __init__(self, slot: Slot, root: object, steps: tuple[tuple[str, Any], ...]) -> None:
        self.slot = slot
        self.steps = steps
        self._root = Strong(root) if isinstance(root, torch.Tensor) else reference(root)

    @property
    def root(self) -> Any:
        """Where to start; None when that is no more."""
        return self._root()

    def bound(self, bind: Callable[[str, object], str]) -> str:
        """Python source for the root; `bind` gives globals names."""
        return bind("root", self._root) + "()"

    def __repr__(self) -> str:
        return f"Source({self.slot}, {self.steps})"

    def get(self) -> Any:
        """The object now."""
        value = self.root
        for kind, key in self.steps:
            value = getattr(value, key) if kind == "attr" else value[key] if kind == "item" else dict.get(value, key)
        return value

    def now(self) -> Any:
        """The object now, or None where there is none."""
        try:
            return self.get()
        except (AttributeError, LookupError, TypeError):
            return None

    def expression(self, root: str, bind: Callable[[str, object], str]) -> str:
        """Python source for the object, given the name of a variable holding the root; `bind` gives globals names."""
        for kind, key in self.steps:
            root = attribute(root, key, bind) if kind == "attr" else item(root, key, bind, makes=kind == "there")
        return root
