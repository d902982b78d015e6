"""Settings of PyTorch that a function makes: settings that operators compute under, and settings that stay after the
call.

Precisions, denormal numbers, deterministic algorithms: a graph runs under one setting of each, that of the call, or the
one that the function makes before its first operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from .._torch.symbols import TracedInt
from ..errors import ForegradError, UnsupportedSideEffectError
from ..graph.call_effects import CallEffect, CallPlace, EffectWriter
from ..locks import Bind
from ..tracing.aspect import Aspect, Settled, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.tape.again import CaptureAgain
from ..tracing.tape.tape import Entry
from ..tracing.values.numbers import TracedFloat
from ._torch import asked, recurrent
from ._torch.settings import (
    ARITHMETIC,
    REPLAYED,
    apply_settings,
    arithmetic,
    changes_between_operators,
    matters_to,
    set_by,
    settings,
    under_settings,
    unfinished,
)

asked.tell_type(TracedFloat, lambda _: float)
asked.tell_type(TracedInt, lambda _: int)


class ArithmeticSettings:
    """The settings `now`: operators run under these while the function runs."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self.now: tuple[Any, ...] = ()
        self._values: dict[str, Any] = {}

    def begin(self, before: dict[str, Any], between: Collection[str]) -> None:
        """The function starts, under the settings `before`; it is known to change `between` between operators."""
        self.now, self._values = arithmetic(), before
        if between:
            self._refuse(between, "operators")

    def watch(self, op: Any, entries: Iterable[Entry]) -> None:
        """An operator is about to be recorded; `entries` were recorded before it."""
        found, before = arithmetic(), self.now
        if found == before:
            return
        is_other = [a != b and matters_to(name, op) for name, a, b in zip(ARITHMETIC, found, before, strict=True)]
        names = [name for name, other in zip(ARITHMETIC, is_other, strict=True) if other]
        if "the default dtype" in names:
            self.refuse_dtype()
        refused = [n for n in names if any(e.target is not None and matters_to(n, e.target) for e in entries)]
        if refused:
            self._refuse(refused, f"operators, before {self.where()}")
        self.now = tuple([a if other else b for a, b, other in zip(found, before, is_other, strict=True)])
        values = settings()
        self._values = self._values | {name: values[name] for name in names}

    def inside(self, before: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
        """The settings that the graph is to run under, where they differ from the call's, or are `known` to be set."""
        values = {name: self._values[name] for name in ARITHMETIC if name in self._values}
        return {name: value for name, value in values.items() if value != before[name] or name in known}

    def _refuse(self, names: Collection[str], where: str) -> None:
        raise UnsupportedSideEffectError(
            f"{', '.join(sorted(names))}: set to something else between {where}, while a graph computes under one "
            "setting. Set it before the first operator, or outside, and compile the parts as functions of their own."
        )

    def refuse_dtype(self) -> None:
        raise UnsupportedSideEffectError(
            f"the default dtype changes before {self.where()}, and a graph uses the default of its call. Set it "
            "outside, or name the dtype of each tensor."
        )


# -------------------------------------------------------------------- settings that stay
# Settings of PyTorch that the function sets for what comes after it: noted, put back, and set by each call.


@dataclasses.dataclass(frozen=True, slots=True)
class RunUnder(CallEffect):
    """The graph runs under settings that differ from its call's: pairs of name and value."""

    settings: tuple[tuple[str, Any], ...]
    place = CallPlace.GRAPH
    storable = True

    def around(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.bind('under_settings', under_settings)}({writer.bind('settings', dict(self.settings))})"]

    def __str__(self) -> str:
        return f"the graph runs under {', '.join(f'{name}={value!r}' for name, value in self.settings)}"


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveSettings(CallEffect):
    """Settings that hold after the call (grad mode, autocast): pairs of name and value."""

    settings: tuple[tuple[str, Any], ...]
    place = CallPlace.LEFT
    instead = "change it outside of the function"

    def lines(self, writer: EffectWriter) -> list[str]:
        settings = writer.bind("settings", dict(self.settings))
        return [f"{writer.bind('apply_settings', apply_settings)}({settings})"]

    def __str__(self) -> str:
        return f"leave {', '.join((f'{name}={value!r}' for name, value in self.settings))} for code after the call"


@aspect
class Settings(Aspect):
    """`after`: settings that the function leaves changed; `inside`: settings that its graph runs under."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder
        self.arithmetic = ArithmeticSettings(lambda: recorder.host.where())
        self.after: dict[str, Any] = {}
        self.inside: dict[str, Any] = {}

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        asked.install(bind, lambda: current() is not None)
        recurrent.install(bind, lambda: current() is not None)

    def resumed(self) -> Aspect:
        return self

    @contextlib.contextmanager
    def around_function(self) -> Iterator[None]:
        """Context: the function's changes of settings are noted, and put back."""
        before, was_inference = settings(), torch.is_inference_mode_enabled()
        function, name = self.recorder.host.call.function, self.recorder.host.name
        self.arithmetic.begin(before, getattr(function, "settings_between", ()))
        try:
            with self.recorder.watched(self.arithmetic.watch):
                yield
        except (CaptureAgain, ForegradError):  # the function runs again, or in eager
            apply_settings(before)
            raise
        known = getattr(function, "settings", ())
        now = settings()
        self.after = {name: value for name, value in now.items() if value != before[name] or name in known}
        self.inside = self.arithmetic.inside(before, known)
        apply_settings({name: before[name] for name in self.after})
        others = sorted({*self.after, *known} - REPLAYED)
        if others:
            raise UnsupportedSideEffectError(
                f"`{name}` changes {', '.join(others)} and does not restore it; a compiled call would not repeat "
                "this. Set it outside."
            )
        check_finished(name, was_inference)
        if "the default dtype" in self.after:
            self.arithmetic.refuse_dtype()  # of operators before it nothing is known

    def effects(self, run: Settled) -> list[CallEffect]:
        inside = [RunUnder(tuple(self.inside.items()))] if self.inside else []
        return [*inside, *([LeaveSettings(tuple(self.after.items()))] if self.after else [])]


def check_finished(name: str, was_inference: bool) -> None:
    """No context was entered that the function has not left, where a compiled call can't enter it as well."""
    context = unfinished(was_inference)
    if context is not None:
        raise UnsupportedSideEffectError(
            f"`{name}` enters {context} and does not leave it. Leave it in the function, or enter it outside."
        )


def note_settings(function: Any, graph: torch.fx.Graph) -> None:
    """Note on a function that runs a graph of Dynamo's the settings that the graph's operators change."""
    function.settings, function.settings_between = set_by(graph), changes_between_operators(graph)
