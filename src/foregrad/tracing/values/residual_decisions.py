"""The values that were read on the way to a derivative, and those that the derivative itself reads.

The arguments are not kept beyond the capture, only what was read of them: that holds whenever a derivative runs, as the
forward's runtime has looked. What a derivative reads besides is computed, when it is captured, from what its first call
brings (saved values, tangents), and becomes a decision of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ...errors import UnsupportedDataDependentError
from ..tape.numbering import Numbering
from ..tape.tape import Entry
from .decisions import Decided, Decisions, picks_by_masks, sized_by_values
from .prefix import Prefix, UnknownValue
from .sizes import OpenCall, SizedCall

AtHand = Callable[[], Mapping[int, Any]]  # real values by value number


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What holds whenever a function runs: values that were read, and operators whose sizes were."""

    values: tuple[Decided, ...]
    sized: tuple[Entry, ...]


class KnownDecisions(Decisions):
    """The decisions of one derivative after the other; `of_capture`: those of the function itself."""

    def __init__(self, before: Decisions, numbering: Numbering) -> None:
        super().__init__(numbering.tape, lambda _entry: None, before.numbers, before.sizes)
        self.numbering = numbering
        sized = numbering.tape.with_operator(sized_by_values)
        self.of_capture = self._known = Known(tuple(before.made), tuple(sized))
        self._sized: list[Entry] = []

    @contextlib.contextmanager
    def deriving(self, known: Known, at_hand: AtHand) -> Iterator[None]:
        """Context: a function that `known` holds for is differentiated, in a call that has these values at hand."""
        self._known, self._sized = known, []
        self.made = []
        self._by_entry.clear()
        self._prefix = _PrefixAtHand(self.numbering, at_hand)
        try:
            yield
        finally:
            self._prefix = _PrefixAtHand(self.numbering, dict)  # holds on to no value

    def now_known(self) -> Known:
        """What holds when this derivative runs, too."""
        return Known((*self._known.values, *self.made), (*self._known.sized, *self._sized))

    def item(self, entry: Entry, where: str, emit: Any) -> Any:
        return self._read_before(entry, lambda: super(KnownDecisions, self).item(entry, where, emit))

    def number(self, entry: Entry, where: str) -> Any:
        return self._read_before(entry, lambda: super(KnownDecisions, self).number(entry, where))

    def _read_before(self, entry: Entry, otherwise: Callable[[], Any]) -> Any:
        numbering = self.numbering
        numbering.extend()
        number = numbering.of(entry)
        for decided in (*self._known.values, *self.made):
            if numbering.of(decided.entry) == number:
                return decided.value
        return otherwise()

    def sized(self, entry: Entry, where: str, emit: Any) -> Any:
        self.numbering.extend()
        key = self._key(entry)
        for other in (*self._known.sized, *self._sized):
            if key is not None and self._key(other) == key:
                entry.target, entry.spec = other.target, other.spec
                self.numbering.renumber(entry)
                return other.spec
        result = super().sized(entry, where, emit)
        self.numbering.renumber(entry)  # another derivative may have found another size
        self._sized.append(entry)
        return result

    def add(self, decided: Decided) -> Decided:
        if decided.symbol is not None:
            raise UnsupportedDataDependentError(
                f"a derivative takes a size from the values read at {decided.where}, and sizes are symbolic here. "
                "Compile with dynamic=False: each size then gets graphs of its own."
            )
        return super().add(decided)

    def _key(self, entry: Entry) -> Any:
        """Equal for entries that have results of the same sizes; None where there is nothing to tell."""
        target = entry.target.op if isinstance(entry.target, (SizedCall, OpenCall)) else entry.target
        if not sized_by_values(entry.target):
            return None
        if picks_by_masks(entry):
            spec = entry.args[0].spec
            return target, self.numbering.key(spec.shape), spec.dtype, self.numbering.key(entry.args[1])
        return target, self.numbering.key(entry.args), self.numbering.key(entry.kwargs)


class _PrefixAtHand(Prefix):
    """The tape, run from what a call of the derivative has at hand."""

    def __init__(self, numbering: Numbering, at_hand: AtHand) -> None:
        super().__init__(numbering.tape, lambda _entry: None)
        self.numbering, self.at_hand = numbering, at_hand
        self.by_number: Mapping[int, Any] | None = None
        self.at = len(numbering.tape.entries)  # the forward has drawn its random numbers

    def value(self, entry: Entry) -> Any:
        if self.by_number is None:
            self.by_number = self.at_hand()
        self.numbering.extend()
        return super().value(entry)

    def known(self, entry: Entry) -> Any:
        assert self.by_number is not None
        value = self.by_number.get(self.numbering.of(entry))
        if is_stand_in(value):
            raise UnknownValue("the contents of a fake tensor, which has none")
        return value

    def _call(self, entry: Entry) -> Any:
        if entry.has_effect:
            raise UnknownValue("a random number")
        return super()._call(entry)

    def _leaf(self, entry: Entry) -> torch.Tensor:
        if entry.constant is None:
            raise UnknownValue("a gradient that comes in from outside, or a value that was not saved")
        return super()._leaf(entry)
