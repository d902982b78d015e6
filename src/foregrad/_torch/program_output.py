"""Prints and logs of a captured function: the capture is asked before anything is written."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..interrupts import runs_user_code
from ..locks import Bind

_NOT_THE_PROGRAMS = ("foregrad", "torch.")
_OF_FAKES = "torch._subclasses."  # logs errors of its kernels, with a traceback
_original_print = builtins.print
_original_handle = logging.Logger.handle


def install(bind: Bind, teller: Callable[[], Callable[..., bool] | None], is_capturing: Callable[[], bool]) -> None:
    """Install the patches. `teller()` gives None, or a function that is called before anything is written on this
    thread, with a text of what is done and where, "print" or "log", and the arguments: whether it is not to be written.
    """

    @runs_user_code
    def print(*args: Any, **kwargs: Any) -> None:
        tell = teller()
        if tell is not None:
            frame = sys._getframe(1)
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            if tell(f"prints at {where}", "print", args, kwargs):
                return
        _original_print(*args, **kwargs)

    @runs_user_code
    def handle(self: logging.Logger, record: logging.LogRecord) -> None:
        if record.name.startswith(_OF_FAKES) and is_capturing():
            return  # the program sees the error itself
        tell = teller()
        if tell is not None and _is_written(self, record):
            where = f"{record.pathname}:{record.lineno} in {record.funcName}"
            if tell(f"logs at {where}", "log", (record, self), {}):
                return
        _original_handle(self, record)

    bind(builtins, "print", print)
    bind(logging.Logger, "handle", handle)


def _is_written(logger: logging.Logger, record: logging.LogRecord) -> bool:
    if logger.disabled or record.name.startswith(_NOT_THE_PROGRAMS):
        return False
    handlers = list(_handlers(logger))
    if not handlers:
        return record.levelno >= logging.WARNING
    return not all(isinstance(handler, logging.NullHandler) for handler in handlers)


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """The handlers that a record of this logger goes to."""
    source: logging.Logger | None = logger
    while source is not None:
        yield from source.handlers
        source = source.parent if source.propagate else None
