"""The function's prints, logs and warnings: effects of each call, and not written now."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from .._torch import engine
from .._torch.patches import is_capturing
from .._torch.stand_ins import is_stand_in
from ..errors import ProgramOutputError
from ..frontend.source import ABSENT
from ..identity import IdSet
from ..interrupts import runs_user_code
from ..locks import Bind
from ..tracing.aspect import Aspect, Finished, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.tape.again import CaptureAgain, GivenOnce
from .effects import CONSOLE, Said, Text, action_for, log_of, print_of, warn_of, warnings_recorded, would_raise
from .holders import NAMESPACE, PASSAGE, Holder
from .libraries import is_class_outside, is_of_library, loggers_of
from .program_state import ProgramState
from .texts import Texts

_OF_KERNELS = "(Triggered internally at "  # in the warnings of PyTorch's C++
_A_WARNING = None, UserWarning, "", "", 0
_given: set[str] = set()  # warnings of C++ that an eager call was given, in place of a capture
_NOT_THE_PROGRAMS = ("foregrad", "torch.")
_OF_FAKES = "torch._subclasses."  # logs errors of its kernels, with a traceback
_original_print = builtins.print
_original_handle = logging.Logger.handle
_original_is_enabled = logging.Logger.isEnabledFor


@aspect
class ProgramOutput(Aspect):
    """The output of one run."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.host, self.recorder = host, recorder
        self.stdout, self.filters = sys.stdout, warnings.filters
        facts = {} if host.learned is None else host.learned.facts
        self.texts = Texts(facts.setdefault(ProgramOutput, set()), recorder.origins.root)
        self.given = facts.setdefault(Warning, set())  # lines with warnings that eager calls were given before
        self.known = frozenset(self.given)
        self.is_strict = would_raise(_A_WARNING)
        self.once = ""
        self.handlers: list[logging.Handler] = []  # the program's own, that were logged to
        self.is_of_backward: Callable[[FrameType, str], bool] = lambda frame, message: False  # each backward warns

    @contextlib.contextmanager
    def around_function(self) -> Iterator[None]:
        numbers = self.recorder.decisions.numbers
        numbers.texts = self.texts if self.host.takes_output else None
        self.host.state.journals.takes(self.texts.take_inside)
        self.host.lifting.heard = self._heard if self.host.call.fills_caches else None
        try:
            yield
        finally:
            numbers.texts = self.host.lifting.heard = None

    def _heard(self, run: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function. A warning that PyTorch gives once in a process, and that the program or the filters
        from outside catch or record, is left to an eager call; later captures are without the warning.
        """
        said, action = warnings_recorded(), action_for(_A_WARNING) if warnings.filters is not self.filters else ""
        is_meant = (action == "error" or (action != "ignore" and said is not None)) if action else self.is_strict
        if not is_meant or torch.is_warn_always_enabled() or (self.known and self.host.where() in self.known):
            return run(function, args, kwargs)
        texts, known = set(), len(said or ())
        torch.set_warn_always(True)  # so none is used up
        try:
            return run(function, args, kwargs)
        except Warning as warning:
            texts.add(str(warning))
            raise
        finally:
            torch.set_warn_always(False)
            texts |= {str(record.message) for record in (said or [])[known:]}
            if texts := {text for text in texts if _OF_KERNELS in text}:
                self.given.add(where := self.host.where())
                if not texts <= _given:
                    self.once = f"`{self.host.name}` catches or records a warning that PyTorch gives once, at {where}"
                _given.update(texts)

    def raise_caught(self) -> None:
        if self.once:
            raise GivenOnce(f"{self.once}. Call it once before: later calls are compiled.")
        if self.given - self.known:
            raise CaptureAgain

    def ran(self) -> None:
        state: Any = self.host.state
        self.texts.take_from(state.changed)
        if self.texts.refuse_read(self.host) or self.texts.refuse_rest(but_result=True):
            raise CaptureAgain

    def returned(self, results: Sequence[object], paths: Sequence[str]) -> None:
        if self.texts.refuse_rest():
            raise CaptureAgain

    def failed(self, error: BaseException) -> bool:
        return self.texts.refuse_rest() and not isinstance(error, KeyboardInterrupt)

    def finished(self, run: Finished) -> None:
        state = self.host.state
        if self.texts.refuse_read(self.host):
            raise CaptureAgain
        if self.handlers and (shared := _shared(state, self.host.reads, self.handlers)):
            raise ProgramOutputError(
                f"`{self.host.name}` logs, and code of a handler can get at {shared}, which the call reads or changes: "
                "a compiled call logs before it writes. Log outside, or keep the handler's state apart."
            )

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
                if output.say(f"prints at {where}", "print", args, kwargs, frame):
                    return
            _original_print(*args, **kwargs)

        @runs_user_code
        def handle(self: logging.Logger, record: logging.LogRecord) -> None:
            if record.name.startswith(_OF_FAKES) and is_capturing():
                return  # the program sees the error itself
            output = taker()
            if output is not None and _is_written(self, record):
                where = f"{record.pathname}:{record.lineno} in {record.funcName}"
                if output.say(f"logs at {where}", "log", (record, self), {}, sys._getframe(1)):
                    return
            _original_handle(self, record)

        def is_enabled(self: logging.Logger, level: int) -> bool:
            enabled, output = _original_is_enabled(self, level), taker()
            if output is not None and not enabled:
                output.texts.drop(sys._getframe(1))
            return enabled

        bind(builtins, "print", print)
        bind(logging.Logger, "isEnabledFor", is_enabled)
        bind(logging.Logger, "handle", handle)

    def say(
        self, verb: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None = None
    ) -> bool:
        """Note output as an effect of the call, or refuse output that can't be repeated. False: the program's own call
        is to run, since it raises or writes to a text or list that the capture compares.
        """
        state, file = self.host.state, kwargs.get("file")
        kernel = frame
        while kernel is not None and kernel.f_code is not self.recorder.kernels.__code__:
            kernel = kernel.f_back
        if kernel is not None:  # an operator's own code says it, and does so in each call
            return False
        is_own = type(file) is io.StringIO and file is not sys.stdout and file is not sys.stderr
        if is_own and (self.host.met(file) or state.made.newborns.has(file)):
            return False
        said: Said | None = None
        if kind == "warn" and warnings.filters is not self.filters:  # in a `catch_warnings` of the program's
            warned = warn_of(*args, outermost=self.recorder.origins.root)
            action = None if warned is None else action_for(warned[1])
            if action in ("ignore", "error") or warnings_recorded() is not None:
                return action == "ignore"
        elif state.journals.are_installed and not self.recorder.in_backward and sys.stdout is self.stdout:
            said = self._said(kind, args, kwargs, frame)
        if said is None:
            if kind == "warn" and self.is_of_backward(args[3], args[0]):
                return True
            error = f"`{self.host.name}` {verb}; a compiled call would not repeat this. Do it outside the function."
            return bool(state.own.observed.fail(ProgramOutputError(error)))
        state.journals.said.append((CONSOLE, f"output (it {verb})", *said))
        return True

    def _said(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Said | None:
        state = self.host.state
        if kind == "log":
            self.handlers += [one for one in _handlers(args[1]) if not is_class_outside(type(one))]
        if kind != "warn":

            def told(value: Any) -> Any:
                return _text_of_tensor(value) if is_stand_in(value) else self.texts.take(frame, value)

            return print_of(told, args, **kwargs) if kind == "print" else log_of(told, *args)
        told_text = self.texts.take(args[3], args[0])
        said = None if kwargs["more"] else warn_of(told_text, *args[1:], outermost=self.recorder.origins.root)
        if said is not None:
            known = (None, *said[1][1:]) if type(told_text) is Text else said[1]
            state.reads.ask(known, f"the action for the warning {known[0]!r}", would_raise)
            if would_raise(known):
                return None
        return said


def _text_of_tensor(tensor: torch.Tensor) -> Any:
    """The text of a tensor of one number, and no dimensions; the tensor where more than the number tells it."""
    if tensor.dim() or type(tensor) is not torch.Tensor or engine.forward_ad._current_level >= 0:
        return tensor
    history = type(tensor.grad_fn).__name__
    if tensor.requires_grad and (not _OPERATOR.fullmatch(history) or history in _MAY_BE_OURS):
        return tensor
    end = f", grad_fn=<{history}>)" if tensor.requires_grad else ")"
    return Text.later([((f"{str(tensor.dtype)[len('torch.') :]}@{tensor.device}", end), tensor.item())])


_OPERATOR = re.compile(r"[A-Z]\w*Backward\d+")
_MAY_BE_OURS = ("AliasBackward0", "AsStridedBackward0", "CloneBackward0", "DetachBackward0", "ViewBackward0")


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


def _shared(state: Any, reads: Any, handlers: Iterable[logging.Handler]) -> str | None:
    """The name of state that the call reads or changes, and code of the program's own `handlers` can get at."""
    others = IdSet(holder.target for holder in ProgramState([]).holders)
    own = [part for handler in handlers for part in (handler, handler.formatter, *handler.filters)]
    classes = {cls for part in own for cls in type(part).__mro__ if not is_of_library(cls)}
    methods = [item for cls in classes for item in vars(cls).values() if isinstance(item, types.FunctionType)]
    reach = ProgramState((part, f"a {type(part).__name__}") for part in (*own, *methods))
    written = {id(holder.target): (holder.before, after) for holder, after in (state.own.after or {}).items()}
    written |= {id(notes.real): ((), ()) for notes, _ in state.journals.made if notes.calls}
    empty = [Holder(PASSAGE, value, parent, step, "", ()) for value, parent, step in reach.empty]
    for holder in [*reach.holders, *empty]:
        place, change = reads.places.get(id(holder.place)), written.get(id(holder.target))
        if holder.target in others or (place is None and change is None):
            continue
        names: Any = ["the contents"]
        if holder.kind is NAMESPACE:
            now, then = change or ({}, {})
            names = {name for name in now | then if now.get(name, ABSENT) is not then.get(name, ABSENT)}
            names |= {} if place is None else {n for n in place.items if not isinstance(holder.before.get(n), _FIXED)}
            names = list(filter(reach.names, names))
        if names:
            return holder.path(names[0]) if holder.kind is NAMESPACE else holder.name()
    return None


_FIXED = (types.FunctionType, types.ModuleType, type)
