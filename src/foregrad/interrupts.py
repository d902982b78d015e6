"""Signals with handlers that may raise, Ctrl-C above all, are delivered where a capture or a compilation can bear an
exception.

While the main thread captures or compiles, a signal waits until the end, or until the user's code runs, where an
exception looks like the code's own. Anywhere else an exception between two instructions would leave a patch or a mode
on; raised in Python that autograd's C++ calls, it would end the process. A compiler that works for minutes is stopped
by the second signal, and by the third if it has called code of foregrad's.

Other threads see no signals: Python runs handlers on the main thread.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from .house import is_house_code

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_WAITING = {"torch.utils.data", "torch.multiprocessing", "torch.distributed"}  # PyTorch's code that waits for processes
_SWALLOWING = {"weakref", "_weakrefset", "gc"}  # an exception there is only printed
_STOPPED = b"foregrad: interrupted; the graph that is being compiled is finished first. Again to stop at once.\n"

_user_callers: set[CodeType] = set()
_compiler_callers: set[CodeType] = set()


def runs_user_code(function: F) -> F:
    """Decorator: the function calls the user's code, and bears any exception from it."""
    _user_callers.add(function.__code__)
    return function


def runs_compiler(function: F) -> F:
    """Decorator: the function calls a compiler that may work for long."""
    _compiler_callers.add(function.__code__)
    return function


class _Held:
    """The context `held`; re-entrant."""

    def __init__(self) -> None:
        self.owner = 0
        self.depth = 0
        self.originals: dict[int, Callable[[int, FrameType | None], object]] = {}
        self.pending: list[int] = []  # the signals that wait
        self.repeated: set[int] = set()  # signals that came twice meanwhile
        self.raised: BaseException | None = None
        self.has_escaped = False
        self.aside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # round each handler

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.depth += 1
        if self.depth > 1:
            return
        self.owner = threading.get_ident()
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler is not _handle:
                    self.originals[number] = handler
                    signal.signal(number, _handle)
        except BaseException:
            self.leave()
            raise

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self.depth > 1:
            self.depth -= 1
            return
        originals, pending = self.originals, self.pending
        lost = self.raised if self.has_escaped and self.raised is not error else None
        self.leave()
        for number in pending:
            originals[number](number, sys._getframe(1))
        if lost is not None:  # code that tries something else after an error took the interrupt for one
            raise lost

    def leave(self) -> None:
        """Restore the handlers."""
        originals, self.originals = self.originals, {}
        self.pending, self.raised, self.has_escaped = [], None, False
        self.repeated.clear()
        for number, handler in originals.items():
            if signal.getsignal(number) is _handle:
                signal.signal(number, handler)
        self.depth = 0


held = _Held()


def _handle(number: int, frame: FrameType | None) -> None:
    """Replacement for each handler."""
    original = held.originals.get(number)
    if original is None:  # left behind by an exception during its installation
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        return
    is_second = number in held.pending
    stops_compiler = is_second and _first_of_foregrad(frame) in _compiler_callers
    if number in held.repeated:
        stops_compiler = stops_compiler or _is_under_compiler(frame)
    if _is_in_user_code(frame) or stops_compiler:
        if is_second:
            held.pending.remove(number)
        held.repeated.discard(number)
        _call(original, number, frame)
        return
    if is_second:
        held.repeated.add(number)
    if not is_second:
        held.pending.append(number)
        if number == signal.SIGINT and _first_of_foregrad(frame) in _compiler_callers:
            os.write(2, _STOPPED)


def _call(original: Callable[..., object], number: int, frame: FrameType | None) -> None:
    try:
        with held.aside():
            original(number, frame)
    except BaseException as error:
        held.raised = error
        raise


def deliver(*, anywhere: bool = False) -> None:
    """Run the handlers of signals that wait, if the caller was called by the user's code; or `anywhere`."""
    if threading.get_ident() != held.owner or not held.depth:
        return
    frame = sys._getframe(2)
    if not anywhere and _first_of_foregrad(frame) not in _user_callers:
        return
    while held.pending:
        number = held.pending.pop()
        _call(held.originals[number], number, frame)


def note_escaping(error: BaseException) -> None:
    """Note an exception from the user's code: if it is a handler's, foregrad must not take it for an error."""
    if error is held.raised and threading.get_ident() == held.owner:
        held.has_escaped = True


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception may have come from outside of the code around it: from a signal's handler, or from a second
    thread (`PyThreadState_SetAsyncExc`). A thread sets the class alone. So do few functions in C (`sys.exit()`), and
    nothing else tells a thread's exception from theirs.
    """
    outer, trace = None, error.__traceback__
    while trace is not None:
        frame, at, trace = trace.tb_frame, trace.tb_lasti, trace.tb_next
        if outer is not None and not is_house_code(frame.f_code):
            values = list(frame.f_locals.values())
            given = itertools.chain(values, *(value for value in values if type(value) is tuple))
            if any(value is outer for value in given):
                return True  # a handler is given the frame that it interrupts
        outer = frame
    if outer is None or error is held.raised or error.args or isinstance(error, (StopIteration, MemoryError)):
        return error is held.raised
    return dis.opname[outer.f_code.co_code[at]] != "RAISE_VARARGS"


def _is_in_user_code(frame: FrameType | None) -> bool:
    """Whether the interrupted code is the user's, or the standard library on its behalf."""
    while frame is not None and _module(frame).partition(".")[0] in sys.stdlib_module_names:
        if _module(frame) in _SWALLOWING:
            return False
        frame = frame.f_back
    if frame is None or is_house_code(frame.f_code):
        return False
    module = _module(frame)
    is_torch = module.partition(".")[0] == "torch" and ".".join(module.split(".")[:3]) not in _WAITING
    return not is_torch and _first_of_foregrad(frame) in _user_callers


def _first_of_foregrad(frame: FrameType | None) -> CodeType | None:
    while frame is not None and not is_house_code(frame.f_code):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _is_under_compiler(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _compiler_callers:
        frame = frame.f_back
    return frame is not None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _in_child() -> None:
    if held.depth and held.owner != threading.get_ident():
        held.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
