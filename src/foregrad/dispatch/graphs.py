"""The graphs of one compiled function, in the order in which calls try them, and how many of them there may be.

A program may take one of several ways, by values of its inputs: one graph a way, up to a limit. A call tries the graphs
whose guards it passes. Each runs as far as its forward, and is dropped without a trace when a decision comes out
otherwise. So every further graph makes a call that fits none of them dearer: past the limit such calls run eagerly, and
when nothing else comes, the graphs are given up.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..config import Config
from ..errors import UnsupportedDataDependentError
from ..locks import make_lock
from .guard_list import MISS
from .refusals import Once
from .specialization import Specialization

__all__ = ["Graphs", "Paths"]

Call = Callable[..., Any]


@dataclasses.dataclass(slots=True)
class _Made:
    """A graph that was made: for a difference in `place`, None for other reasons; whether it has served twice."""

    place: Any
    served_again: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Noticing:
    """The function of a graph until its second call. It keeps no graphs alive."""

    call: Call
    made: _Made
    graphs: weakref.ref[Graphs]

    def __call__(self, args: Any, kwargs: Any) -> Any:
        result, graphs = self.call(args, kwargs), self.graphs()
        if result is not MISS and graphs is not None:
            self.made.served_again = True
            graphs.noticed(self)
        return result


class Graphs:
    """`made` are the specializations, the oldest first; `calls` their functions, the one used last first."""

    def __init__(self) -> None:
        self.made: list[Specialization] = []
        self.calls: tuple[Call, ...] = ()
        self._order = make_lock()  # held to set `calls`, never while anything runs
        self._history: list[_Made] = []
        self._noticing: dict[int, Call] = {}  # by the id of a graph's function: what notices the second call of it

    def to_front(self, call: Call) -> None:
        if self._order.acquire(blocking=False):  # another thread does the like: its order is as good
            try:
                if call in self.calls:
                    self.calls = (call, *(c for c in self.calls if c is not call))
            finally:
                self._order.release()

    def add(self, specialization: Specialization, place: Any = None) -> None:
        """One more, which serves the call at hand. `place`: what differs there from calls for which there is one."""
        self.made.append(specialization)
        made, call = _Made(place), specialization.call
        self._history.append(made)
        noticing = _Noticing(call, made, weakref.ref(self))
        with self._order:
            self._noticing[id(call)] = noticing
            self.calls = (noticing, *self.calls)

    def noticed(self, noticing: _Noticing) -> None:
        """A graph has served twice: from now on it is called by itself."""
        with self._order:
            self._noticing.pop(id(noticing.call), None)
            if noticing in self.calls:
                self.calls = (noticing.call, *(c for c in self.calls if c is not noticing))

    def in_a_row(self, place: Any) -> int:
        """How many were made for differences in `place` since one was made for another, or has served twice."""
        count = 0
        for made in reversed(self._history):
            if made.place != place or made.served_again:
                break
            count += 1
        return count

    def remove(self, specialization: Specialization) -> None:
        call = specialization.call
        with self._order:
            if specialization in self.made:
                self.made.remove(specialization)
            noticing = self._noticing.pop(id(call), None)
            self.calls = tuple(c for c in self.calls if c is not call and c is not noticing)

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


_GIVEN_UP_AFTER = 8


class Paths:
    """What a dispatcher knows of the ways its function takes."""

    def __init__(self, name: str, config: Config, once: Once) -> None:
        self.name, self.once = name, once
        self.config = config
        self.lost = 0  # calls past the limit that no graph was right for
        self.diverged = 0  # fresh graphs that came out otherwise than when they were captured

    def at_limit(self, specializations: Sequence[Specialization]) -> bool:
        """Whether no graph is to be made for a further way."""
        if self.diverged >= _GIVEN_UP_AFTER:
            return True
        return len(_ways(specializations)) >= self.config.path_limit

    def past_limit(self, specializations: Sequence[Specialization]) -> bool:
        """Warn, or raise where the settings say so; True when the graphs are to be given up."""
        if self.config.error_on_recompile_limit or not self.once.said:
            message = self._message(specializations)
            if self.config.error_on_recompile_limit:
                raise UnsupportedDataDependentError(message)
            self.once.warn(message + " Such calls run eagerly from now on.")
        self.lost += 1
        return self.lost >= _GIVEN_UP_AFTER

    def _message(self, specializations: Sequence[Specialization]) -> str:
        values: dict[str, set[str]] = {}
        for specialization in specializations:
            for decision in specialization.product.captured.joint.signature.decisions:
                values.setdefault(decision.where, set()).add(repr(decision.value))
        where, different = max(values.items(), key=lambda item: len(item[1]), default=("an unknown line", set()))
        return (
            f"`{self.name}` was compiled {len(_ways(specializations))} times for values that it reads from its inputs, "
            f"which is the limit. Most of them, {len(different)}, were read at {where}. Keep the value a tensor "
            "(torch.where, masking), compute it outside and pass it, or raise foregrad.config.path_limit."
        )


def _ways(specializations: Sequence[Specialization]) -> set[tuple[str, ...]]:
    """What was decided, by each graph that decides anything: graphs for other shapes may have gone the same way."""
    signatures = [s.product.captured.joint.signature for s in specializations if s.decides]
    return {tuple(f"{d.where} {d.value!r}" for d in signature.decisions) for signature in signatures}
