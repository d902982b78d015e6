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
    """The wrappers that a function was given: those that it reached by itself, and what the gradients of those among
    its arguments are like, by their first leaf.
    """

    reached: tuple[ReachedWrapper, ...]
    gradients: Mapping[int, WrapperSpec | None]
