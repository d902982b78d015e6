"""The wrapper subclasses that a capture found among what a function was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..subclasses.spec import WrapperSpec
from .sources import Source

__all__ = ["FoundWrappers", "ReachedWrapper"]


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
