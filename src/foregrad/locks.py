"""What threads share while they capture and compile, none of which a forked child inherits from other threads.

Locks, the turn that threads take to make graphs for one function, and what is in place for the whole process as long
as any thread wants it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .interrupts import deliver

__all__ = ["InPlace", "Turn", "make_lock", "taken", "without_user_code"]

PATIENCE_S = 2.0  # for another thread that captures the same function, while that one's own code runs
_LOOK_AGAIN_S = 0.05

_all: weakref.WeakSet[Any] = weakref.WeakSet()
_in_place: list[InPlace] = []


def make_lock() -> Any:
    """A re-entrant lock. In a forked child it is free, unless the thread that forked held it."""
    lock = threading.RLock()
    _all.add(lock)
    return lock


@contextlib.contextmanager
def taken(lock: Any) -> Iterator[None]:
    """Context: a lock is held. Signals are looked at while another thread holds it."""
    while not lock.acquire(timeout=_LOOK_AGAIN_S):
        deliver(anywhere=True)
    try:
        yield
    finally:
        lock.release()


def _before_fork() -> None:
    for each in _in_place:  # none is half in place; nobody holds these for longer than that takes
        each.lock.acquire()


def _in_parent() -> None:
    for each in _in_place:
        each.lock.release()


def _in_child() -> None:
    for lock in list(_all):
        if not lock._is_owned():
            lock._at_fork_reinit()
    for each in _in_place:
        each.forget_other_threads()
        each.lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


class InPlace:
    """A context: something of the whole process, put in place by the first thread that enters, and back by the last."""

    def __init__(self, install: Callable[[], None], remove: Callable[[], None]) -> None:
        self._install = install
        self._remove = remove
        self.lock = make_lock()
        self._depths: dict[int, int] = {}  # by thread
        _in_place.append(self)

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self.lock:
            if not self._depths:
                self._install()
            self._depths[me] = self._depths.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self.lock:
            self._depths[me] -= 1
            if not self._depths[me]:
                del self._depths[me]
                if not self._depths:
                    self._remove()

    def forget_other_threads(self) -> None:
        """In a forked child: only the thread that forked is left."""
        me = threading.get_ident()
        if self._depths and me not in self._depths:
            self._remove()
        self._depths = {me: self._depths[me]} if me in self._depths else {}


class Turn:
    """One thread at a time captures and compiles a function.

    A capture runs the user's code, which may wait for another thread; should that thread call the same function, each
    would wait for the other. So nobody waits long while the user's code may be running.
    """

    def __init__(self) -> None:
        self._lock = make_lock()
        self._runs_user_code = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[bool]:
        """Context: whether it is this thread's turn, which it is but for a thread that has waited long enough."""
        if not self._wait():
            yield False
            return
        before, _thread.turn = getattr(_thread, "turn", None), self
        user_code, self._runs_user_code = self._runs_user_code, True
        try:
            yield True
        finally:
            self._runs_user_code = user_code
            _thread.turn = before
            self._lock.release()

    def _wait(self) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        waited = 0.0
        while waited < PATIENCE_S:
            start = time.monotonic()
            if self._lock.acquire(timeout=_LOOK_AGAIN_S):
                return True
            deliver(anywhere=True)
            if self._runs_user_code:
                waited += time.monotonic() - start
        return False


_thread = threading.local()


@contextlib.contextmanager
def without_user_code() -> Iterator[None]:
    """Context: nothing of the user's runs here, so that others may wait for it as long as it takes."""
    turn: Turn | None = getattr(_thread, "turn", None)
    if turn is None:
        yield
        return
    before, turn._runs_user_code = turn._runs_user_code, False
    try:
        yield
    finally:
        turn._runs_user_code = before
