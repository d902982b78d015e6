"""The graphs of one compiled function, in the order in which calls try them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..locks import make_lock
from .specialization import Specialization

__all__ = ["Graphs"]


class Graphs:
    """`made` are the specializations, the oldest first; `calls` their functions, the one used last first."""

    def __init__(self) -> None:
        self.made: list[Specialization] = []
        self.calls: tuple[Callable[..., Any], ...] = ()
        self._order = make_lock()  # held to set `calls`, never while anything runs

    def to_front(self, call: Callable[..., Any]) -> None:
        if self._order.acquire(blocking=False):  # another thread does the like: its order is as good
            try:
                if call in self.calls:
                    self.calls = (call, *(c for c in self.calls if c is not call))
            finally:
                self._order.release()

    def add(self, specialization: Specialization) -> None:
        self.made.append(specialization)
        with self._order:
            self.calls = (specialization.call, *self.calls)

    def remove(self, specialization: Specialization) -> None:
        with self._order:
            if specialization in self.made:
                self.made.remove(specialization)
            self.calls = tuple(c for c in self.calls if c is not specialization.call)

    def drop_dead(self) -> None:
        """Drop graphs of objects that are gone, and let go of parameters that were replaced."""
        for specialization in list(self.made):
            if specialization.watch.dead:
                self.remove(specialization)
            specialization.watch.forget()

    def try_none(self) -> None:
        """No call tries any of them."""
        with self._order:
            self.calls = ()

    def try_undecided(self) -> None:
        """Calls try only those that are right for any values."""
        with self._order:
            self.calls = tuple(s.call for s in self.made if not s.decides)
