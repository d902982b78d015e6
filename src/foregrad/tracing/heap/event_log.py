"""The effect log while it is recorded: what happened to tensors in place, by one sequence number.

An entry is the one that a call replays, but for what is known only once the function has run: which input or result it
happens to, and whose memory that is given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...graph.effect_log import Detach, Effect, Handle, InplaceView, SetData
from .alias import Value, now

__all__ = ["SOMETHING", "Event", "EventLog"]

SOMETHING = Handle("")  # the source of memory that is not known yet


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """It happened to the tensor with this id, which was `value` until then, at the time `at`.

    `required_grad`: so it did until then. `after`: what it is since it was given other memory. `op`: what changed its
    sizes or gave it memory.
    """

    at: int
    effect: Effect
    tensor: int
    value: Value
    required_grad: bool
    op: Any = None
    after: Value | None = None

    @property
    def is_detach(self) -> bool:
        """Whether it was `detach_()`."""
        return isinstance(self.effect, Detach) and self.effect.in_place


class EventLog:
    """`events`: what happened to tensors, but for writes of their elements, in program order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(
        self, effect: Effect, tensor: torch.Tensor, value: Value, op: Any = None, after: Value | None = None
    ) -> int:
        """Note what happens to a tensor, which is `value`: when."""
        self.events.append(Event(now(), effect, id(tensor), value, tensor.requires_grad, op, after))
        return self.events[-1].at

    def of(self, tensor: torch.Tensor, *kinds: type[Effect]) -> list[Event]:
        return [event for event in self.events if event.tensor == id(tensor) and isinstance(event.effect, kinds)]

    def changes_of(self, tensor: torch.Tensor) -> list[Event]:
        """When its sizes or its memory changed."""
        return self.of(tensor, InplaceView, SetData)

    def detached(self, tensor: torch.Tensor) -> list[Event]:
        return [event for event in self.of(tensor, Detach) if event.is_detach]
