"""The function's prints, logs and warnings: effects of each call, and not written now."""

from __future__ import annotations

import builtins
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from .._torch.patches import is_capturing
from ..errors import ProgramOutputError
from ..frontend.libraries import is_class_outside, loggers_of
from ..graph.python_effects import (
    CONSOLE,
    Said,
    action_for,
    is_recording_warnings,
    log_of,
    print_of,
    warn_of,
    would_raise,
)
from ..interrupts import runs_user_code
from ..locks import Bind
from ..tracing.aspect import Aspect, aspect
from ..tracing.heap.recording import Host, Recording

_NOT_THE_PROGRAMS = ("foregrad", "torch.")
_OF_FAKES = "torch._subclasses."  # logs errors of its kernels, with a traceback
_original_print = builtins.print
_original_handle = logging.Logger.handle


@aspect
class ProgramOutput(Aspect):
    """The output of one run."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.host, self.recorder = host, recorder
        self.stdout, self.filters = sys.stdout, warnings.filters

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        """The capture is asked before anything is written."""

        def taker() -> ProgramOutput | None:
            one: ProgramOutput | None = current()
            return one if one is not None and one.host.takes_output else None

        @runs_user_code
        def print(*args: Any, **kwargs: Any) -> None:
            output = taker()
            if output is not None:
                frame = sys._getframe(1)
                where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                if output.say(f"prints at {where}", "print", args, kwargs):
                    return
            _original_print(*args, **kwargs)

        @runs_user_code
        def handle(self: logging.Logger, record: logging.LogRecord) -> None:
            if record.name.startswith(_OF_FAKES) and is_capturing():
                return  # the program sees the error itself
            output = taker()
            if output is not None and _is_written(self, record):
                where = f"{record.pathname}:{record.lineno} in {record.funcName}"
                if output.say(f"logs at {where}", "log", (record, self), {}):
                    return
            _original_handle(self, record)

        bind(builtins, "print", print)
        bind(logging.Logger, "handle", handle)

    def say(self, verb: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note output as an effect of the call, or refuse output that can't be repeated. False: the program's own call
        is to run, since it raises or writes to a text or list that the capture compares.
        """
        state, file = self.host.state, kwargs.get("file")
        is_own = type(file) is io.StringIO and file is not sys.stdout and file is not sys.stderr
        if is_own and (self.host.met(file) or state.made.newborns.has(file)):
            return False
        said: Said | None = None
        if kind == "warn" and warnings.filters is not self.filters:  # in a `catch_warnings` of the program's
            warned = warn_of(*args, outermost=self.recorder.origins.root)
            action = None if warned is None else action_for(warned[1])
            if action in ("ignore", "error") or is_recording_warnings():
                return action == "ignore"
        elif state.journals.are_installed and not self.recorder.in_backward and sys.stdout is self.stdout:
            said = self._said(kind, args, kwargs)
        if said is None:
            error = f"`{self.host.name}` {verb}, which a compiled call would not repeat. Do it outside the function."
            return bool(state.own.observed.fail(ProgramOutputError(error)))
        state.journals.said.append((CONSOLE, f"what it {verb}", *said))
        return True

    def _said(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Said | None:
        state = self.host.state
        if kind == "log" and _is_read_by_handlers(state, args[1]):
            return None
        if kind != "warn":
            return print_of(args, **kwargs) if kind == "print" else log_of(*args)
        said = None if kwargs["more"] else warn_of(*args, outermost=self.recorder.origins.root)
        if said is not None:
            state.reads.ask(said[1], f"what is done with the warning {said[1][0]!r}", would_raise)
            if would_raise(said[1]):
                return None
        return said


def _is_written(logger: logging.Logger, record: logging.LogRecord) -> bool:
    if logger.disabled or record.name.startswith(_NOT_THE_PROGRAMS):
        return False
    handlers = list(_handlers(logger))
    if not handlers:
        return record.levelno >= logging.WARNING
    return not all(isinstance(handler, logging.NullHandler) for handler in handlers)


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """The handlers for a record of the logger."""
    for above in loggers_of(logger):
        yield from above.handlers
        if not above.propagate:
            return


def _is_read_by_handlers(state: Any, logger: Any) -> bool:
    """The function logs. Whether a handler of the program's own may look at the run's changes so far."""
    if all(is_class_outside(type(handler)) for handler in _handlers(logger)):
        return False
    return bool(state.before.changed()) or any(target is not CONSOLE for target, *_ in state.journals.calls())
