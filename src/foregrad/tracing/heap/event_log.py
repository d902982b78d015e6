"""One time axis: when each view was taken, and what happened to tensors in place, by one sequence number."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from .alias import Value, now

__all__ = ["Event", "EventLog", "Happened"]


class Happened(enum.Enum):
    """What happened to a tensor in place, but for writes of its elements."""

    MARKED = enum.auto()  # `requires_grad_()`
    UNMARKED = enum.auto()  # `requires_grad_(False)`
    DETACHED = enum.auto()
    RESHAPED = enum.auto()  # sizes or strides
    DATA = enum.auto()  # `.data = ...`
    SET = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """It happened to the tensor with this id, which was `value` until then, at the time `at`.

    `after`: what it is since it was given other memory.
    """

    at: int
    what: Happened
    tensor: int
    value: Value
    op: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    grad_enabled: bool = True
    after: Value | None = None


class EventLog:
    """`events`: what happened to tensors, in program order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, what: Happened, tensor: torch.Tensor, value: Value, *call: Any, after: Value | None = None) -> int:
        """Note what happens to a tensor, which is `value`: when. `call`: operator, arguments, keywords, grad mode."""
        event = Event(now(), what, id(tensor), value, *call)
        self.events.append(event if after is None else dataclasses.replace(event, after=after))
        return self.events[-1].at

    def of(self, tensor: torch.Tensor, *kinds: Happened) -> list[Event]:
        return [event for event in self.events if event.tensor == id(tensor) and event.what in kinds]

    def swaps_of(self, tensor: torch.Tensor) -> list[Event]:
        """When it was given other memory."""
        return self.of(tensor, Happened.DATA, Happened.SET)

    def moved(self) -> dict[int, int]:
        """By the id of a tensor: when its sizes or memory last changed in place."""
        kinds = Happened.RESHAPED, Happened.DATA, Happened.SET
        return {event.tensor: event.at for event in self.events if event.what in kinds}
