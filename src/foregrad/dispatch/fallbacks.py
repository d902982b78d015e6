"""Calls without a graph: the capture's outcome decides whether they run eagerly, and the warning.

A refusal is remembered by the kind of the call: the types of its arguments, their tensors' metadata, plain values that
may steer the function, and the modes in force. A call of a refused kind is captured again after 256 calls, after 1024
and so on, since the obstacle may have been in a single call; where the function has graphs, after 16 and 64 too. After
some kinds no kind is tried any more, so the time spent on failed captures is bounded.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..config import Config
from ..errors import (
    EscapedTensorError,
    ForegradError,
    TensorTextError,
    UnknownLeafError,
    UnsupportedError,
    UnsupportedSideEffectError,
    headline,
    without_frames,
)
from ..graph.attempts import attempts
from ..graph.effect_log import CheckFailed
from ..identity import ById
from ..interrupts import held, is_interrupt
from ..tracing.tape.again import ArgumentsDiffer
from .explain import SIZES_ARE_FIXED, Difference, EagerCalls, OneWarning, reason_of
from .graphs import Graphs, Specialization
from .pipeline import is_of_capture

_log = logging.getLogger("foregrad.eager")

_FEW = 8  # items: the kind of a list up to this length is its items' kinds
FORMS_ASKED = 8  # refused calls that ask a function's forms first, after the last refusal
_MOST_TRIES = 3  # of calls that made a container grow, once it does not
_CHOOSING = (bool, str, type(None))
_TRIED_AGAIN, _SELDOM = frozenset(4**n for n in range(2, 16)), 256  # refused calls; those where there is no graph


@dataclasses.dataclass
class _Growing:
    container: Any
    length: int  # at the last look
    wanted: int  # the least number of items for a graph; 1: it is to stop growing


class Refusals:
    """The calls of one function that run eagerly. `mode` is "eager", or "raise" if no call may run eagerly.
    `limit`: the number of kinds of calls that are told apart.
    """

    def __init__(
        self,
        function: Callable[..., object],
        name: str,
        mode: str,
        once: OneWarning | None = None,
        limit: int = Config.refusal_limit,
        graphs: Callable[[], Graphs | None] = lambda: None,
    ) -> None:
        self.function, self.name, self.mode, self.limit, self.graphs = function, name, mode, limit, graphs
        self.by_kind: dict[object, EagerCalls] = {}
        self.always: EagerCalls | None = None  # counts every call that fits no graph, once no kind is tried
        self.entries: list[EagerCalls] = []
        self.filling: list[EagerCalls] = []  # calls that filled a cache: later ones are compiled
        self.once = once or OneWarning()
        self._growing: ById[EagerCalls, _Growing] = ById()
        self._tries = 0
        self._module = getattr(function, "__self__", None)
        self.forms_asked = 0  # how many refused calls still ask the forms first; a call that a form serves adds one

    def __bool__(self) -> bool:
        return bool(self.entries) and not self.forms_asked

    def covers(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> EagerCalls | None:
        """The count of calls of the refused kind, the present call included; None if the kind was not refused."""
        entry = self.always
        if entry is None:
            kind = self.kind(args, kwargs)
            entry = self.by_kind.get(kind)
            if entry is None or self._has_grown(entry):
                return None
            graphs = self.forms_asked or getattr(self.graphs(), "specializations", False)
            if entry.count in _TRIED_AGAIN and (entry.count >= _SELDOM or graphs):
                del self.by_kind[kind]
                return None
        entry.count += 1
        self.forms_asked = max(self.forms_asked - 1, 0)
        return entry

    def _has_grown(self, entry: EagerCalls) -> bool:
        """Whether a container that grew in the refused calls has stopped growing, so the calls are tried again."""
        growing = self._growing.get(entry)
        if growing is None:
            return False
        now = len(growing.container)
        is_full = now >= growing.wanted if growing.wanted > 1 else now == growing.length
        growing.length = now
        if is_full:
            del self._growing[entry]
            self.by_kind = {kind: other for kind, other in self.by_kind.items() if other is not entry}
        return is_full

    def note(self, args: tuple[object, ...], kwargs: Mapping[str, object], error: BaseException) -> EagerCalls:
        """Record that a call is refused for `error`: it and its kind run eagerly. `tell` warns."""
        entry = self.count_only(reason_of(self.function, self.name, error))
        container = getattr(error, "container", None)
        if container is not None and self._tries < _MOST_TRIES:
            self._tries += 1
            self._growing[entry] = _Growing(container, len(container), getattr(error, "wanted", 1))
        self.by_kind[self.kind(args, kwargs)] = entry
        if len(self.by_kind) > self.limit:
            self.always = entry
        return entry

    def tell(self, entry: EagerCalls) -> None:
        """Warn once that calls run eagerly."""
        _log.info("%s", entry)
        self.once.warn(
            f"{entry.reason} Calls like this run eagerly: the results are eager's, only not compiled. "
            '(foregrad.compile(..., on_unsupported="raise") makes this an error, explain_recompiles() counts and '
            "times the calls.)"
        )

    def count_only(self, reason: str, *, is_fill: bool = False) -> EagerCalls:
        """Count one more call that runs eagerly for a reason that was reported elsewhere."""
        entries = self.filling if is_fill else self.entries
        entry = next((entry for entry in entries if entry.reason == reason), None)
        if entry is None:
            entry = EagerCalls(reason)
            entries.append(entry)
        entry.count += 1
        return entry

    def again(self, args: tuple[object, ...], kwargs: Mapping[str, object], fault: BaseException) -> object:
        """Make a call in eager after its graph raised `fault` and left nothing. Eager raises the program's own errors,
        with everything done by then that comes before.
        """
        without_frames(fault)
        result = self.function(*args, **kwargs)
        if self.mode == "raise":
            raise fault
        said = f"A graph of `{self.name}` raised an error that eager does not, or catches ({headline(fault)})."
        self.tell(self.count_only(said))
        return result

    def kind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """The kind of a call: refused calls of equal kinds are treated alike."""
        module = self._module
        modes = torch.is_grad_enabled(), getattr(module, "training", None), torch.is_inference_mode_enabled()
        return modes, tuple(map(_kind_of, args)), tuple((key, _kind_of(value)) for key, value in kwargs.items())


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.layout, value.dim()
    cls = type(value)
    if cls in _CHOOSING:
        return cls, value
    return (cls, tuple(map(_kind_of, value))) if cls in (tuple, list) and len(value) <= _FEW else cls


class Fallbacks:
    """The eager calls of one function. `refusals` remembers the kinds, `graphs` are the function's graphs."""

    def __init__(
        self, function: Callable[..., object], name: str, config: Config, refusals: Refusals, graphs: Graphs
    ) -> None:
        self.function, self.name, self.config, self.refusals, self.graphs = function, name, config, refusals, graphs
        self.past = PastLimit(graphs)
        self._past = ""  # the reason of calls past the limit
        self._fills = 0  # calls that filled a cache, or changed a state
        self._in_a_row = collections.Counter[str]()  # "fills" counts such calls, "raises" eager calls with errors

    @property
    def may_fill(self) -> bool:
        """Whether a call may still be one that fills a cache."""
        return self._in_a_row["fills"] < _MOST_FILLS

    @property
    def fills_too_often(self) -> bool:
        """Whether no further graph is tried, since each call changes some state."""
        is_over = self._fills > self.config.recompile_limit or self._in_a_row["fills"] > self.config.single_use_limit
        return is_over and not self.config.error_on_recompile_limit

    @property
    def only_raises(self) -> bool:
        """Whether calls run eagerly until one raises nothing: the program raised after each of the last captures."""
        return self.refusals.mode == "eager" and self._in_a_row["raises"] >= self.config.single_use_limit

    def note_graph(self) -> None:
        """Note that a graph was made, so the last call filled nothing and raised nothing."""
        self._in_a_row.clear()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, object], error: BaseException | None) -> Any:
        """Run a call without a graph; `error` is the reason to report, if there is one."""
        as_it_was, refusals = attempts().give_up(), self.refusals
        if error is None:
            with as_it_was:
                return self._counted(*args, **kwargs)
        if isinstance(error, ForegradError):
            entry = refusals.note(args, kwargs, error)
            refusals.tell(entry)  # first: a warning that is an error comes in place of the call
            with as_it_was:
                return entry.call(self.function, args, kwargs)
        measured = EagerCalls("")
        with as_it_was:
            result = measured.call(self._counted, args, kwargs)  # raises where the error is the program's own
        if is_interrupt(error):
            raise error
        if refusals.mode == "raise":
            raise UnsupportedError(reason_of(self.function, self.name, error)) from error
        entry = refusals.note(args, kwargs, error)
        entry.timed, entry.seconds = entry.timed + 1, entry.seconds + measured.seconds
        refusals.tell(entry)
        return result

    def _counted(self, *args: object, **kwargs: object) -> Any:
        """An eager call; counts errors of the program in a row."""
        self._in_a_row["raises"] += 1
        result = self.function(*args, **kwargs)
        self._in_a_row["raises"] = 0
        return result

    def after(self, error: BaseException) -> BaseException | None:
        """The error to report for a call that runs eagerly since its capture raised `error`; None if there is nothing
        to report, or a warning was given. Raises errors meant for the caller.
        """
        if isinstance(error, CheckFailed):  # eager raises, or the function catches it
            return None
        if isinstance(error, EscapedTensorError):
            self._in_a_row["fills"] += 1
            self._note_eager(error)
            return None
        if isinstance(error, TensorTextError) and self.refusals.mode == "raise":
            self._note_eager(error)
            return None
        if isinstance(error, ArgumentsDiffer) or not self._is_refusal(error):
            raise error
        return error

    def _is_refusal(self, error: BaseException) -> bool:
        """Whether calls that lead to the error run eagerly: the function can't be compiled, or its capture failed."""
        if isinstance(error, ForegradError):
            return self.refusals.mode == "eager" and isinstance(error, (UnsupportedError, UnknownLeafError))
        return error is not held.raised and is_of_capture(error)

    def _note_eager(self, error: UnsupportedError) -> None:
        """Note a call that can't be compiled since it changes state: in each call, or this once, to fill a cache."""
        self._fills += 1
        self.refusals.count_only(str(error), is_fill=self._fills <= _MOST_FILLS)
        if self._fills > self.config.recompile_limit and self.config.error_on_recompile_limit:
            raise error
        if self.fills_too_often or isinstance(error, TensorTextError):
            self.refusals.once.warn(f"{error} Calls like this run eagerly.")

    def past_the_limit(self, args: Any, kwargs: Any) -> None:
        """Note a call that fits none of the graphs when their number is at the limit. Raises if `config` says so."""
        if self._past and not self.config.error_on_recompile_limit:
            self.past.reached(self.refusals.count_only(self._past))
            return
        message = f"`{self.name}` may not be compiled at all: the limit is {self.config.recompile_limit}. "
        remedy = _REMEDY
        if made := self.graphs.specializations:
            difference = made[-1].difference(args, kwargs)
            end = "the limit" if len(made) >= self.config.recompile_limit else "and most graphs served one call"
            message = f"`{self.name}` was compiled {len(made)} times, {end}; this call fits no graph: {difference}. "
            if difference.name.endswith((".shape", ".stride()")):
                remedy = SIZES_ARE_FIXED if difference.fixed else _REMEDY_OF_SIZES
        message += remedy
        if self.config.error_on_recompile_limit:
            raise UnsupportedError(message)
        self._past = message
        self.past.reached(self.refusals.count_only(message))
        self.refusals.once.warn(message + " It runs eagerly from now on.")

    def never_again(self, difference: Difference) -> UnsupportedError:
        """The error for a call that gets no graph, since the graphs before it served one call each."""
        error = UnsupportedError(
            f"`{self.name}` was compiled {self.config.single_use_limit} times in a row for one call each, because "
            f"{difference.name} differs in each call ({difference.before}, then {difference.now}). Keep it equal from "
            "call to call, compute with a number as a number (no text or index), or pass a tensor."
        )
        if self.config.error_on_recompile_limit:
            raise error
        self.graphs.try_only(self.graphs.has_served_again)
        return error

    def unguardable(self, args: Any, kwargs: Any, specialization: Specialization) -> Exception:
        """The error for a call that fails its own graph's guards right after its capture."""
        self.graphs.remove(specialization)
        difference = specialization.difference(args, kwargs)
        error = UnsupportedSideEffectError(
            f"`{self.name}` changes a value that its graph depends on, and a compiled call would not repeat the "
            f"change: {difference}. Move the change out of the compiled function."
        )
        if not self._is_refusal(error):
            raise error
        return error


class PastLimit:
    """Calls past a limit on graphs: they run eagerly without a look at the graphs, but for one call now and then. While
    no graph serves a call, one call in 16 tries the graphs.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self.calls: EagerCalls | None = None
        self._pause, self._left = float(_FIRST_PAUSE), 0.0

    def reached(self, calls: EagerCalls, *, for_good: bool = False) -> None:
        """A call was found to be past a limit. The pause until the next look doubles each time."""
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if calls is self.calls else _FIRST_PAUSE
        self.calls, self._left = calls, math.inf if for_good else self._pause

    def covers(self) -> EagerCalls | None:
        """The count of calls that fit no graph, the present call included; None if the call is to be looked at."""
        if not self._left:
            return None
        self._left -= 1
        if self._left % _TURN == 0:
            self.graphs.try_only(lambda s: not s.decides or self.graphs.vain < math.inf)
        elif self._left % _TURN == _TURN - 1:
            self.graphs.rest()
        if self.calls is not None:
            self.calls.count += 1
        return self.calls


_FIRST_PAUSE, _LONGEST_PAUSE, _TURN = 32, 1024, 16  # calls

_MOST_FILLS = 2  # calls in a row that fill a cache; a later change is one of state
_REMEDY = "Raise foregrad.config.recompile_limit, or pass values that change from call to call as tensors."
_REMEDY_OF_SIZES = (
    "Raise foregrad.config.recompile_limit. With dynamic=False, and where the program needs the number itself (a loop, "
    "an index), each size has its own graph: pad to fewer sizes."
)


class Transformed:
    """Calls under torch.func transforms or with dual numbers, where no annex compiles them: they run eagerly."""

    def __init__(
        self, function: Callable[..., object], compile_flat: Callable[..., object], config: Config, name: str
    ) -> None:
        self.function, self.compile_flat, self.config, self.name = function, compile_flat, config, name
        self.refusals = Refusals(function, name, config.on_unsupported, limit=config.refusal_limit)

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        self._refuse(args, kwargs, UnsupportedError(f"`{self.name}` is called {_UNDER_TRANSFORMS}"))
        return self.function(*args, **kwargs)

    def _refuse(self, args: tuple[object, ...], kwargs: Mapping[str, object], error: UnsupportedError) -> None:
        if self.config.on_unsupported == "raise":
            raise error
        self.refusals.tell(self.refusals.note(args, kwargs, error))


_UNDER_TRANSFORMS = "under a torch.func transform or with dual numbers: this installation has no part for these"
