"""What a run has written to Python's state, told from what other threads write meanwhile.

Globals and attributes are a run's where code that ran may set them by name. Of what it writes to, there are two copies:
from before it and from after it. What lies between them is put back as a difference, so that what came later stays.

Known weakness: what another thread writes during the run itself to a list, a dict or a set, or under a name that the
run may set, too, is taken for the run's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..._torch.symbols import concrete, has_symbolic, map_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend import holders as kinds
from ...frontend.expected import ABSENT
from ...frontend.holders import Holder, adopted, own_globals, without
from ...frontend.lifted import lifted_places, stand_in_at
from ...frontend.program_state import ProgramState
from ...frontend.reads import Reads
from ...frontend.tree import flatten
from ...subclasses.spec import is_of_capture
from .observed import Observed

_MOST_DISTURBED = 8  # runs


class OwnWrites:
    """The writes of one run of `function` to the state `before`. `after`: what the run left in the holders that it has
    written to, until its backward; `read`: what was there for it where that may have changed. `disturbed`: places that
    are arguments and that other threads wrote to, in this run and in those before.
    """

    def __init__(self, before: ProgramState, function: Any, observed: Observed, disturbed: list[str]) -> None:
        self.before, self.function, self.observed, self.disturbed = before, function, observed, disturbed
        self.after: dict[Holder, Any] | None = None
        self.read: dict[Holder, dict[Any, Any]] = {}
        self._count = len(disturbed)
        self._looked: dict[Holder, dict[Any, Any]] = {}  # what was there when writes were last told apart

    def begin(self) -> None:
        """What differs now another thread has written: nothing runs yet."""
        for holder in self.before.changed() if len(sys._current_frames()) > 1 else ():
            holder.before = holder.kind.read(holder.target)

    def changed(self) -> list[Holder]:
        """The holders that the run has written to. All else that has changed is as if it had been so before."""
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
                self.disturbed.append(place.path)  # the run may have met what was made of its stand-in
                place.put(without(found.before.get(place.key, ABSENT), stand_in, now))
        for holder in named.values():
            self.read.setdefault(holder, holder.before)
            now = self._looked[holder] = holder.kind.read(holder.target)
            holder.before = adopted(holder.before, now, names)
            if self.after is not None and holder in self.after:
                self.after[holder] = adopted(self.after[holder], now, names)
        return [holder for holder in written if holder.is_written()]

    def needs_another_run(self, name: str) -> bool:
        """Whether the run may have computed with what another thread made of its stand-ins."""
        if len(self.disturbed) > _MOST_DISTURBED:
            raise UnsupportedSideEffectError(
                f"`{name}` reads {self.disturbed[-1]}, to which another thread writes in the middle of each capture. "
                "Hand in what it reads."
            )
        return len(self.disturbed) > self._count

    def guard_what_was_read(self, reads: Reads) -> None:
        """Where another thread has written, what the run found is to be there again."""
        for holder, before in self.read.items():
            reads.expect(holder.place, before)

    def undo(self, holder: Holder) -> None:
        """Put back what the run has written."""
        if self.after is None or self.observed.has_run:  # the backward may have written, too
            holder.put_back(*([self._looked[holder]] if holder in self._looked else ()))
        else:
            holder.put_back(self.after.get(holder, holder.before))

    def leave(self, holder: Holder) -> None:
        """Take stand-ins out of what a run that is interrupted has written: numbers are what they are in this call."""
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
    """Whether there is a tensor of a capture's in a value."""
    return any(isinstance(leaf, torch.Tensor) and is_of_capture(leaf) for leaf in flatten(value)[0])


def now_in(holder: Holder) -> Any:
    """A copy of what a holder has now."""
    now = holder.kind.read(holder.target)
    return own_globals(now) if holder.kind is kinds.NAMESPACE else now
