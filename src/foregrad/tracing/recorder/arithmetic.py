"""Settings that operators compute under: precisions, denormal numbers, deterministic algorithms.

A graph runs under one setting of each: that of the call, or the one that the function makes before its first operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from ..._torch.settings import ARITHMETIC, arithmetic, matters_to, settings
from ...errors import UnsupportedSideEffectError
from ..tape.tape import Entry

__all__ = ["ArithmeticSettings"]


class ArithmeticSettings:
    """What operators run under; `now` is None while nobody looks."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self.now: tuple[Any, ...] | None = None
        self._values: dict[str, Any] = {}

    def begin(self, before: dict[str, Any], between: Collection[str]) -> None:
        """The function starts, under the settings `before`; it is known to change those `between` operators."""
        self.now, self._values = arithmetic(), before
        if between:
            self._refuse(between, "operators")

    def end(self) -> None:
        self.now = None

    def changed(self, op: Any, entries: Iterable[Entry]) -> None:
        """The operator runs under others than `now`; `entries` were recorded before it."""
        found, before = arithmetic(), self.now or ()
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
        """The settings that the graph is to run under, where they are others than the call's, or `known` to be set."""
        values = {name: self._values[name] for name in ARITHMETIC if name in self._values}
        return {name: value for name, value in values.items() if value != before[name] or name in known}

    def _refuse(self, names: Collection[str], where: str) -> None:
        raise UnsupportedSideEffectError(
            f"{', '.join(sorted(names))}: set to something else between {where}, while a graph computes under one "
            "setting. Set it before the first operator, or outside, and compile the parts as functions of their own."
        )

    def refuse_dtype(self) -> None:
        raise UnsupportedSideEffectError(
            f"the default dtype is set to another one before {self.where()}: which dtype a graph's "
            "numbers become is the default of its call. Set it outside, or name the dtype of each tensor."
        )
