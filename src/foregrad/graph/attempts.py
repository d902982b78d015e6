"""Attempts at a call: captures, runs of several graphs, an eager run. Some work runs once in all attempts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..annexes import given


class RaisedInCallError(Exception):
    """Raised inside of a graph: the user's function raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclasses.dataclass(frozen=True, slots=True)
class Attempts:
    """An annex's part in the attempts at this thread's call; by default none.

    `begin`: a graph begins to run, or to be captured. `rewind`: the graph is wrong for the call, and a second graph
    runs. `finish`: the graph was right. `give_up` gives a context for an eager run of the call, with Python's state
    from before the call; `undo_then(undo)` has a change undone there. `in_one_call` gives a context: captures and
    graphs inside are part of one call.
    """

    begin: Callable[[], None] = lambda: None
    rewind: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None
    give_up: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    in_one_call: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    undo_then: Callable[[Callable[[], None]], None] = lambda undo: None


def attempts() -> Attempts:
    """The annex's part."""
    found: Attempts = next(iter(given("attempts at a call")), _NONE)
    return found


_NONE = Attempts()
