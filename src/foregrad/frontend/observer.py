"""What the interpreter tells of a run: the C functions that are called, and the code that runs; in Python.

The C++ part has the same, at a tenth of the cost. Both are profile functions of one thread. A profiler that was there
before is told of everything, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

from .known_calls import DIVERTED, LOOKED_AT, OPAQUE, PURE

__all__ = ["Observer"]


class Observer:
    """`of_callee(callee)` says how much is known of a C function, `of_code(code, frame)` how far code is looked at,
    each asked once; `on_call(callee, frame)` is told before each call of what is not pure, and may raise.
    """

    def __init__(
        self, of_callee: Callable[[Any], int], of_code: Callable[[Any, Any], int], on_call: Callable[[Any, Any], None]
    ) -> None:
        self._of_callee, self._of_code, self._on_call = of_callee, of_code, on_call
        self._codes: dict[CodeType, int] = {}
        self._inside = self._quiet = 0
        self._is_on = False
        self._before: Any = None

    def start(self) -> None:
        """From now on this thread is observed."""
        if not self._is_on:
            self._before, self._is_on, self._inside, self._quiet = sys.getprofile(), True, 0, 0
            sys.setprofile(self._event)

    def stop(self) -> None:
        """No more."""
        if self._is_on:
            self._is_on = False
            sys.setprofile(self._before)

    def pause(self) -> None:
        """What runs until `go_on` is the capture's own."""
        self._quiet += 1
        if self._is_on and self._quiet == 1 and self._before is None:
            sys.setprofile(None)

    def go_on(self) -> None:
        """The end of the last `pause`."""
        self._quiet -= self._quiet > 0
        if self._is_on and not self._quiet and self._before is None:
            sys.setprofile(self._event)

    def _event(self, frame: FrameType, what: str, argument: Any) -> None:
        if self._before is not None:
            self._before(frame, what, argument)
        if self._quiet:
            return
        if what == "call":
            if self._inside:
                self._inside += 1
            elif self._trust(frame) == OPAQUE:
                self._inside = 1
        elif what == "return":
            self._inside -= self._inside > 0
        elif what == "c_call" and not self._inside and isinstance(argument, BuiltinFunctionType):
            self._called(frame, argument)

    def _trust(self, frame: FrameType) -> int:
        code = frame.f_code
        if code not in self._codes:
            self._quiet += 1
            try:
                self._codes[code] = self._of_code(code, frame)
            finally:
                self._quiet -= 1
        return self._codes[code]

    def _called(self, frame: FrameType, callee: Any) -> None:
        if self._trust(frame) != LOOKED_AT:
            return
        self._quiet += 1
        try:
            if callee in DIVERTED or self._of_callee(callee) != PURE:
                self._on_call(callee, frame)
        finally:
            self._quiet -= 1
