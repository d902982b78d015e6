"""The closed world of one run: its calls into C are in the table of `python/known_calls.py`, or the call is eager.

The interpreter tells of each call before it is made, so that a call that is not known is never made. A method that
writes is fine on objects from the walk before the run, and on the run's own. Of any further object a copy is kept from
before the first write, and a remaining write is refused by name and taken back.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property  # noqa: TID251 - the program's
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import torch

from .._torch.native import divert, native
from ..errors import UnsupportedSideEffectError
from ..house import is_house_code
from ..interrupts import runs_user_code
from ..tracing.heap.recording import Host
from ..tracing.tape.collection import Newborns
from .code import entered_by, may_set
from .draw_patches import code_begins
from .expected import is_bound
from .holders import Holder, kind_of
from .known_calls import (
    DIVERTED,
    LOOKED_AT,
    OPAQUE,
    PURE,
    REFUSED,
    REFUSED_CODE,
    REFUSED_NAMES,
    TRUSTED,
    WRITES,
    kind_of_call,
    trust_in,
)
from .libraries import LOCKS, is_outside, is_standard
from .output import ProgramOutput
from .scan import LOOKS_UP

_CACHED_PROPERTY = cached_property.__get__.__code__
_SETS_WHAT_IT_IS_TOLD = {
    function.__code__
    for function in (torch.nn.Module.__setattr__, torch.nn.Module.__getattr__, functools.update_wrapper)
}
_SET_THEIR_OWN = "sympy.", "torch._ops"
_FEW = 64  # above this number, objects that nobody else holds any more are let go
_OWN_REFERENCES = 3  # of an object that only this refers to: its holder, a variable, an argument

T = TypeVar("T")


class Observed:
    """One run's actions besides computing. `ran`: the code that ran and is looked at, with its globals. `begins` is
    called before code runs that is no library's.
    """

    def __init__(self, host: Host, begins: Callable[[CodeType, dict[str, Any]], None]) -> None:
        self.name, self.host, self.begins = host.name, host, begins
        self.ran: dict[CodeType, dict[str, Any]] = {}
        self.entered: dict[CodeType, dict[str, Any]] = {}  # code that ran, PyTorch's too
        self.called: list[Any] = []  # functions of libraries called by code that is looked at
        self._apart: set[CodeType] = set()  # nothing under it is the program's
        self._met: dict[int, Holder] = {}
        self._variables: dict[int, Any] = {}  # of contexts, that the program sets
        self._failed: UnsupportedSideEffectError | None = None
        self._begin()

    def _begin(self) -> None:
        self._observer = _observer(self._kind_of, self._trust, self._on_call)
        self.has_run = False  # code that is looked at, since the observer began

    def pause(self) -> None:
        self._observer.pause()

    def go_on(self) -> None:
        self._observer.go_on()

    def may_set(self) -> frozenset[str] | None:
        """The globals and attributes that the code that ran may set; None: any."""
        names: set[str] = set()
        for code, namespace in self.entered.items():
            sets_its_own = str(namespace.get("__name__")).startswith(_SET_THEIR_OWN)
            if sets_its_own or code in _SETS_WHAT_IT_IS_TOLD or is_house_code(code):
                continue
            if code is _CACHED_PROPERTY:  # code reads it by the name that it sets
                names.update(*(own.co_names for own in self.ran))
            elif (found := may_set(code, is_trusted=code not in self.ran)) is None:
                return None
            else:
                names |= found
        return frozenset(names)

    def of(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function that does what `function` does, observed, in a copy of the context."""

        @runs_user_code
        def run(*args: Any, **kwargs: Any) -> T:
            _see_asked()
            before, _running.observed = getattr(_running, "observed", None), self
            self._begin()
            self._observer.start()
            try:
                return function(*args, **kwargs)
            finally:
                self._observer.stop()
                _running.observed = before

        self._root = run.__code__

        def in_context(*args: Any, **kwargs: Any) -> T:
            context = contextvars.copy_context()
            try:
                result = context.run(run, *args, **kwargs)
            finally:
                left = self._left_in(context)
            if left is not None:
                self._failed = self._failed or UnsupportedSideEffectError(
                    f"`{self.name}` sets the context variable `{left.name}` for code after the call; a compiled call "
                    "would not repeat this. Set it outside the compiled function."
                )
            return result

        return in_context

    def unobserved(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function that does what `function` does, with the observer paused until it returns."""

        def run(*args: Any) -> T:
            self.pause()
            try:
                return function(*args)
            finally:
                self.go_on()

        self._apart.add(run.__code__)
        return functools.wraps(function)(run)

    def raise_failed(self) -> None:
        """The run was refused, whoever has caught that meanwhile."""
        if self._failed is not None:
            raise self._failed

    # ---------------------------------------------------------------- what the observer asks

    def _kind_of(self, callee: Any) -> int:
        """The table's entry for a function of C. A capture sees no earlier bound method of a random generator."""
        if not is_bound(callee) and not isinstance(callee.__self__, type):
            self.called.append(callee)
        return REFUSED if isinstance(callee.__self__, torch.Generator) else kind_of_call(callee)

    def _trust(self, code: CodeType, frame: FrameType) -> int:
        self.host.state.begins(code)
        found = self._found(code, frame)
        self.entered[code] = frame.f_globals  # code refused before it begins has written nothing
        if frame.f_globals is vars(random):
            code_begins(code, frame.f_globals)
        if code in LOOKS_UP:
            self.host.looks_up()  # now, and not when all has run
        is_of_optimizers = "float" in code.co_names and str(frame.f_globals.get("__name__")).startswith("torch.optim")
        return LOOKED_AT if is_of_optimizers else found  # `float(loss)` is the program's: see `trace_math`

    def _found(self, code: CodeType, frame: FrameType) -> int:
        if is_house_code(code):
            return TRUSTED
        if any(getattr(callback, "__code__", None) is code for callback in gc.callbacks):
            self._apart.add(code)
            return OPAQUE
        is_refused = code in REFUSED_CODE or code.co_name in REFUSED_NAMES.get(_root(frame), "").split()
        if is_refused and not _is_for_pytorch(frame.f_back):
            self._refuse(
                f"`{self.name}` calls `{_name(frame)}` at {_line(frame.f_back)}; a compiled call would not repeat "
                "this. Call it outside the compiled function."
            )
        found = trust_in(frame.f_globals.get("__name__"), code.co_filename, code.co_name)
        if found == OPAQUE:
            self._apart.add(code)
        elif "f_back" in code.co_names and not _is_for_pytorch(frame):
            self.looks_back(frame)
        if found != LOOKED_AT and frame.f_back is not None and frame.f_back.f_code in self.ran:
            function = frame.f_globals.get(code.co_name)
            self.called += [function] if getattr(function, "__code__", None) is code else []
        if found == LOOKED_AT and not _is_for_pytorch(frame):
            self.has_run = True
            if code in self.ran:
                return found
            state = self.host.state.before
            state.meet(code, frame.f_globals)  # before names are bound there
            is_own = not is_outside(frame.f_globals.get("__name__"))
            entered, written = entered_by(code)
            takes = is_own and entered and not entered.isdisjoint(state.names_of(LOCKS))
            if takes and written - state.names_of((threading.local,)):
                self._refuse(
                    f"`{self.name}` takes a lock and writes to Python's state at {_line(frame)}, and a compiled call "
                    "would not hold the lock. Take it outside the compiled function."
                )
            if is_own and (named := state.untold.intersection(code.co_names + code.co_freevars)):
                self._refuse(_UNKNOWN.format(self.name, f"names `{min(named)}`", _line(frame)))
            self.ran[code] = frame.f_globals
            if is_own:
                code_begins(code, frame.f_globals)
                self.begins(code, frame.f_globals)
        return found

    def _on_call(self, callee: Any, frame: FrameType) -> None:
        if (not self.warns(frame)) if callee is warnings.warn else _is_for_pytorch(frame):
            return
        if kind_of_call(callee) == WRITES:
            self._write(callee, frame)
        else:
            self._refuse(_UNKNOWN.format(self.name, f"calls {_spelled(callee)}", _line(frame)))

    def warns(self, frame: FrameType | None) -> bool:
        """Whether a warning by the code of a frame is the program's. PyTorch's own are, except once-in-a-process
        warnings. Under the capture's operators, under an eager region and under an import none is.
        """
        assert frame is not None
        code, root = frame.f_code, _root(frame)
        is_meant = root in _WARN_FOR_THE_PROGRAM or trust_in(root, code.co_filename, code.co_name) == LOOKED_AT
        is_meant = is_meant and not (root == "torch" and code.co_name in _WARN_ONCE)
        while is_meant and frame is not None and frame.f_code is not self._root:
            code, frame = frame.f_code, frame.f_back
            is_dispatch = code.co_name == "__torch_dispatch__" and is_house_code(code)
            is_meant = not (is_dispatch or code in self._apart)
        return is_meant

    def asked(self, function: str, value: Any) -> None:
        """Observed code calls `id` or `hash`, and so tells objects apart."""
        if self.host.varies(value):
            self._refuse(
                f"`{self.name}` calls `{function}` of an argument at {_line(sys._getframe(2))}: the object differs in "
                "each call. Call it outside the compiled function, and pass the result."
            )

    def looks_back(self, frame: FrameType) -> NoReturn:
        """The code of a frame looks at frames that the function may have been called from."""
        self._refuse(
            f"`{self.name}` reads its caller's frames at {_line(frame)}; the caller may differ in each call. Pass "
            "the information as an argument. (In eager calls, too, foregrad's frames lie between.)"
        )

    def _write(self, callee: Any, frame: FrameType) -> None:
        target = callee.__self__
        if isinstance(target, contextvars.ContextVar):
            self._variables[id(target)] = target
        elif id(target) not in self._met and not self.host.state.before.has_met(target):
            self._track(target, callee, frame)

    def _track(self, target: Any, callee: Any, frame: FrameType) -> None:
        kind = kind_of(target)
        if kind is None:
            self._refuse(
                f"`{self.name}` calls {_spelled(callee)} at {_line(frame)}, and the call writes to an object that "
                "can't be restored. Do it outside the compiled function."
            )
        if len(self._met) > _FEW:
            self._let_go()
        text = f"a {type(target).__name__} that {_spelled(callee)} writes to at {_line(frame)}"
        self._met[id(target)] = Holder(kind, target, None, text, "", kind.read(target))

    def _let_go(self) -> None:
        """Let go of objects held by nothing else: the run made them."""
        for key in [key for key, holder in self._met.items() if sys.getrefcount(holder.target) < _OWN_REFERENCES]:
            del self._met[key]

    def _refuse(self, message: str) -> NoReturn:
        self.fail(UnsupportedSideEffectError(message))

    def fail(self, error: UnsupportedSideEffectError) -> NoReturn:
        self._failed = self._failed or error
        raise self._failed

    # ---------------------------------------------------------------- afterwards

    def _changed(self) -> Iterator[Holder]:
        self._let_go()
        yield from (h for h in self._met.values() if not h.kind.same(h.target, h.before))

    def check(self, newborns: Newborns) -> None:
        """Raise where the run has written to something older than itself that no walk has met."""
        for holder in self._changed():
            if not newborns.has(holder.target):
                self._refuse(
                    f"`{self.name}` writes to {holder.step}, an object older than the call that foregrad does not "
                    "look into. Do it outside the compiled function, or pass the object as an argument."
                )

    def give_up(self) -> None:
        """Everything as it was."""
        for holder in self._changed():
            holder.put_back()

    def _left_in(self, context: contextvars.Context) -> Any:
        """A variable that the program has set; variables set by PyTorch's own code are set outside, too."""
        outside, found = contextvars.copy_context(), None
        for variable, value in context.items():
            if outside.get(variable, context) is not value:
                if id(variable) in self._variables:
                    found = variable
                else:
                    variable.set(value)
        return found


def _observer(*questions: Callable[..., Any]) -> Any:
    return make_observer(*questions) or Observer(*questions)


def make_observer(*questions: Callable[..., Any]) -> Any:
    """The C++ version of `Observer`; None if the extension has none."""
    make = getattr(native(), "Observer", None)
    return None if make is None else make(*questions)


_running = threading.local()
_UNKNOWN = (
    "`{}` {} at {}, a function not known to be pure: it may have effects, or read state, that a compiled call would "
    "miss. Call it outside the compiled function, or in a function that `foregrad.eager_region` marks."
)
_WARN_FOR_THE_PROGRAM = ("torch", "typing_extensions")
_WARN_ONCE = ("_warn_once", "_warn_typed_storage_removal", "fork_rng", "warn_once")
_OF_IDENTITY: tuple[Any, ...] = (object.__hash__, torch.Tensor.__hash__)


def _warned(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **others: Any) -> Any:
    observed: Observed | None = getattr(_running, "observed", None)
    frame = sys._getframe(1)
    if observed is None or not observed.warns(frame):
        return NotImplemented
    is_more = source is not None or bool(others)
    verb, said = f"warns at {_line(frame)}", (message, category, stacklevel, frame)
    return (
        None
        if observed.host.aspects.by_class[ProgramOutput].say(verb, "warn", said, {"more": is_more})
        else NotImplemented
    )


def _collect(generation: int = 2) -> int:
    """Objects older than the call are not the call's: their finalizers run at the program's next collection."""
    return gc.collect(1 if generation == 2 else generation)


def _found_frame(depth: int = 0) -> Any:
    observed: Observed | None = getattr(_running, "observed", None)
    asking = frame = sys._getframe(1)
    while observed is not None and depth > 0:
        assert frame.f_back is not None  # `Observed.of` lies on the way
        frame, depth = frame.f_back, depth - 1
        if is_house_code(frame.f_code):
            observed.looks_back(asking)
    return NotImplemented


@functools.cache
def _see_asked() -> None:
    """From now on captures are told of warnings, calls that tell one object from another, collections and frames."""
    divert(warnings.warn, _warned, None)
    divert(gc.collect, _collect, None, asked=True)
    divert(sys._getframe, _found_frame, None, asked=True)
    for function in (id, hash):

        def instead(value: Any, name: str = function.__name__) -> Any:
            observed: Observed | None = getattr(_running, "observed", None)
            if observed is not None and (name == "id" or type(value).__hash__ in _OF_IDENTITY):
                observed.asked(name, value)
            return NotImplemented

        divert(function, instead, None, asked=True)


def _spelled(callee: Any) -> str:
    owner = callee.__self__
    if owner is None or type(owner) is type(sys):
        module = str(callee.__module__ or getattr(owner, "__name__", ""))
        return f"`{module}.{callee.__name__}`" if module not in ("", "builtins") else f"`{callee.__name__}`"
    return f"`{(owner if isinstance(owner, type) else type(owner)).__qualname__}.{callee.__name__}`"


def _line(frame: FrameType | None) -> str:
    """The line of the user's that leads there, and that of the library that makes the call."""
    last = frame
    while frame is not None and _is_librarys(frame):
        frame = frame.f_back
    frame = frame or last
    assert frame is not None
    text = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return text if frame is last or last is None else f"{text} (by {_name(last)})"


def _is_for_pytorch(frame: FrameType | None) -> bool:
    """Whether the standard library, or a progress bar, works for PyTorch's own code (its logs, for one), and not for
    the program.
    """
    while frame is not None and (is_standard(frame.f_code.co_filename) or _root(frame) == "tqdm"):
        frame = frame.f_back
    return frame is not None and trust_in(frame.f_globals.get("__name__"), frame.f_code.co_filename) == TRUSTED


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"


def _is_librarys(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_house_code(frame.f_code) or file.startswith(_LIBRARIES) or os.sep + "site-packages" + os.sep in file


_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, "<frozen ")


# -------------------------------------------------------------------- the observer in Python
# The interpreter tells an observer the C functions that a run calls, and the code that runs. This observer is in
# Python.
#
# The C++ part has a second observer, at a tenth of the cost. Both are profile functions of one thread. A profiler that
# was there before hears everything, too.


class Observer:
    """`of_callee(callee)` says how much is known of a C function, `of_code(code, frame)` how far code is looked at,
    each asked once; `on_call(callee, frame)` runs before each call that is not pure, and may raise.
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
        """Code that runs until `go_on` is the capture's own."""
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
        if self._trust(frame) != LOOKED_AT and callee is not warnings.warn:
            return
        self._quiet += 1
        try:
            if callee in DIVERTED or self._of_callee(callee) != PURE:
                self._on_call(callee, frame)
        finally:
            self._quiet -= 1
