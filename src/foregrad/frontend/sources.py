"""Where a tensor that a function reaches by itself is kept, so that it is read again on every call.

Rebinding anything on the way is noticed, because the chain of steps is walked again at each call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..graph.slots import Slot
from ..graph.spelling import attribute, item
from ..subclasses.spec import WrapperSpec
from .expected import Strong, reference


class Source:
    """How to reach an object: from `root`, by `steps` of ("attr", name) or ("item", key).

    A root that can be referred to weakly is not kept alive, unless it is a tensor: one that nothing leads to is read
    from here alone.
    """

    __slots__ = ("_root", "slot", "steps")

    def __init__(self, slot: Slot, root: Any, steps: tuple[tuple[str, Any], ...]) -> None:
        self.slot = slot
        self.steps = steps
        self._root = Strong(root) if isinstance(root, torch.Tensor) else reference(root)

    @property
    def root(self) -> Any:
        """Where to start; None when that is no more."""
        return self._root()

    def bound(self, bind: Callable[[str, Any], str]) -> str:
        """Python source that reads the root; `bind` gives globals names."""
        return bind("root", self._root) + "()"

    def __repr__(self) -> str:
        return f"Source({self.slot}, {self.steps})"

    def get(self) -> Any:
        """The object now."""
        value = self.root
        for kind, key in self.steps:
            value = getattr(value, key) if kind == "attr" else value[key]
        return value

    def expression(self, root: str, bind: Callable[[str, Any], str]) -> str:
        """Python source that reads it, given the name of a variable holding the root; `bind` gives globals names."""
        for kind, key in self.steps:
            root = attribute(root, key, bind) if kind == "attr" else item(root, key, bind)
        return root


@dataclasses.dataclass(frozen=True, slots=True)
class ReachedWrapper:
    """A wrapper that the function reached by itself: where, and the spec of its gradient (None: as predicted)."""

    source: Source
    spec: WrapperSpec
    gradient: WrapperSpec | None


@dataclasses.dataclass(frozen=True, slots=True)
class FoundWrappers:
    """The wrappers that a function was given: those that it reached by itself, and of those among its arguments, by
    their first leaf, what they are like and what their gradients are like.
    """

    reached: tuple[ReachedWrapper, ...]
    arguments: Mapping[int, tuple[WrapperSpec, WrapperSpec | None]]
