"""The writes of a run to Python's state, beside the writes of other threads.

A run owns the globals and attributes that its code may set by name. A holder that the run writes to has two copies,
from before and from after the run. Their difference is put back, so later writes of other threads stay.

Known weakness: a write of another thread during the run itself counts as the run's, where it goes to a list, a dict or
a set, or to a name that the run's code may set too.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .._torch.symbols import concrete, has_symbolic, map_symbolic
from .._torch.wrappers import is_of_capture
from ..errors import UnsupportedSideEffectError
from ..frontend.source import ABSENT
from ..frontend.tree import flatten
from . import holders as kinds
from .holders import Holder, adopted, own_globals, without
from .lifted import lifted_places, stand_in_at
from .observed import Observed
from .program_state import ProgramState
from .reads import Reads, keys_in

_MOST_DISTURBED = 8  # runs


class OwnWrites:
    """The writes of one run of `function` to the state `before`. `after`: copies of the written holders as the run left
    them, until its backward; `read`: copies of the holders for the run's reads, where other threads wrote. `disturbed`:
    places among the arguments that other threads wrote to, in all runs so far.
    """

    def __init__(self, before: ProgramState, function: Any, observed: Observed, disturbed: list[str]) -> None:
        self.before, self.function, self.observed, self.disturbed = before, function, observed, disturbed
        self.after: dict[Holder, Any] | None = None
        self.read: dict[Holder, dict[Any, Any]] = {}
        self._count = len(disturbed)
        self._looked: dict[Holder, dict[Any, Any]] = {}  # the values there when writes were last told apart

    def begin(self) -> None:
        """Accept the changes so far: they are other threads', since nothing runs yet."""
        for holder in self.before.changed() if len(sys._current_frames()) > 1 else ():
            holder.before = holder.kind.read(holder.target)

    @contextlib.contextmanager
    def of_handler(self) -> Iterator[None]:
        """Context: a signal's handler runs. Its writes count as older than the run, and the function runs again."""
        written = set(self.before.changed())
        was = {holder: holder.kind.read(holder.target) for holder in self.before.holders}
        try:
            yield
        finally:
            self.before.changed()
            for holder in self.before.holders:
                left, kind = was.get(holder, holder.before), holder.kind
                if kind.same(holder.target, left):
                    continue
                now = kind.read(holder.target)
                if holder in written:
                    holder.put_back(left)
                holder.before = now_in(holder)
                if holder in written:
                    kind.put_back(holder.target, now, holder.before)
                self.disturbed.append(holder.name() or "an object")

    def changed(self) -> list[Holder]:
        """The holders that the run has written to. Other changes count as older than the run."""
        written = self.before.changed()
        names = self.observed.may_set() if written else None
        if names is None:
            return written
        named = {id(holder.target): holder for holder in written if holder.is_by_name}
        for place in lifted_places(self.function):
            stand_in, now = stand_in_at(self.function, place.identity), place.get()
            if now is stand_in:
                names |= {place.key}
            elif place.key not in names and (found := named.get(id(place.target))) is not None:
                self.disturbed.append(place.path)  # the run may have met an object made of its stand-in
                place.put(without(found.before.get(place.key, ABSENT), stand_in, now))
        for holder in named.values():
            self.read.setdefault(holder, holder.before)
            now = self._looked[holder] = holder.kind.read(holder.target)
            holder.before = adopted(holder.before, now, names)
            if self.after is not None and holder in self.after:
                self.after[holder] = adopted(self.after[holder], now, names)
        return [holder for holder in written if holder.is_written()]

    def needs_another_run(self, name: str) -> bool:
        """Whether the run may have computed with a second thread's change of its stand-ins."""
        if len(self.disturbed) > _MOST_DISTURBED:
            raise UnsupportedSideEffectError(
                f"`{name}` reads {self.disturbed[-1]}, and a second thread writes to it during each capture. Pass "
                "the value as an argument."
            )
        return len(self.disturbed) > self._count

    def guard_what_was_read(self, reads: Reads) -> None:
        """Guard the values that the run read where a second thread has written since."""
        for holder, before in self.read.items():
            reads.expect(holder.place, before)

    def undo(self, holder: Holder) -> None:
        """Put the run's writes back."""
        if self.after is None or self.observed.has_run:  # the backward may have written, too
            holder.put_back(*([self._looked[holder]] if holder in self._looked else ()))
        else:
            holder.put_back(self.after.get(holder, holder.before))

    def leave(self, holder: Holder) -> None:
        """Take stand-ins out of the writes of an interrupted run; numbers get the call's values."""
        kind, now = holder.kind, now_in(holder)
        is_row = kind.items is enumerate
        before = {} if is_row and len(now) != len(holder.before) else dict(holder.items())
        left = [(key, before.get(key, ABSENT) if is_made(value) else value) for key, value in kind.items(now)]
        kept = {key: map_symbolic(value, concrete) if has_symbolic(value) else value for key, value in left}
        if any(kept[key] is not value for key, value in kind.items(now)):
            there = {key: value for key, value in kept.items() if value is not ABSENT}
            single = kept.get("cell_contents") if kind is kinds.CELL else there
            kind.put_back(holder.target, list(there.values()) if is_row else single, now)


def is_made(value: Any) -> bool:
    """Whether a value holds a capture's tensor."""
    return any(isinstance(leaf, torch.Tensor) and is_of_capture(leaf) for leaf in flatten(value)[0])


def now_in(holder: Holder) -> Any:
    """A copy of a holder's present contents."""
    now = holder.kind.read(holder.target)
    return own_globals(now) if holder.kind is kinds.NAMESPACE else now


def forget_written(reads: Reads, state: ProgramState, read: Mapping[Holder, dict[Any, Any]]) -> None:
    """Drop from `reads` the items first looked at after their write: a call does not depend on their former values. All
    state is as before, but for other threads' writes: there `read` has the former state.
    """
    by_place = {id(holder.place): before for holder, before in read.items()}
    held = {id(holder.place) for holder in state.holders} | {id(container) for container, _, _ in state.empty}
    for place in [place for place in reads.places.values() if id(place.holder) in held]:
        before = by_place.get(id(place.holder))
        if place.kind == "asked" or (before is None and place.difference() is None):
            continue
        there = {key: place.look(key) if before is None else before.get(key, ABSENT) for key in place.items}
        for key in [key for key, value in there.items() if not place.items[key].holds(value)]:
            _forget_contents(reads, place.items.pop(key).before(), state)
        place.keys = place.keys and keys_in(place.holder if before is None else before)
        place.absent.difference_update(place.appeared() if before is None else before)


def _forget_contents(reads: Reads, value: Any, state: ProgramState) -> None:
    """Drop the items of a container that the run made."""
    if isinstance(value, (list, dict, set, collections.deque)) and not state.knows(value):
        place = reads.places.pop(id(value), None)
        for expected in place.items.values() if place is not None else ():
            _forget_contents(reads, expected.before(), state)
