"""Values of the inputs that the program reads while it is captured: to branch on, to take a size from.

The value is found by running the recorded prefix of the tape on the real arguments. The graph is then right for calls
with an equal value: it becomes a `Decision`, an output of the forward graph that the runtime looks at before any effect
of the call is visible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..._torch.engine import plain_execution
from ..._torch.ops import OpOverload, depends_on_values
from ..._torch.stand_ins import is_stand_in
from ..._torch.symbols import symbol_made
from ...errors import UnsupportedDataDependentError
from ...graph.meta import TensorSpec, spec_of_value
from ..heap.views import Emit
from ..kernels.checks import Checks
from ..tape.again import NumberVaries
from ..tape.tape import Entry, Numbering, Tape, entries_in, map_entries
from .numbers import Numbers
from .prefix import Prefix, UnknownValue
from .sizes import OpenCall, OpenSizes, SizedCall, shapes_of

aten = torch.ops.aten


@dataclasses.dataclass(slots=True)
class Decided:
    """One value that was read: `entry` computes it (a tensor of one element, unless `is_tensor` is False)."""

    entry: Entry
    value: Any
    where: str
    is_tensor: bool = True
    symbol: Any = None  # of a size that is not decided on: the graph serves more than this one


class Decisions:
    """The values read so far in one capture.

    `real_of(entry)` gives the tensor behind an input's entry, None for an entry that is no input. `varied` are the
    lines with symbolic numbers, since the numbers vary from call to call; None where all are decided. `checks`: made
    before a value is read.
    """

    def __init__(
        self,
        tape: Tape,
        real_of: Callable[[Entry], torch.Tensor | None],
        numbers: Numbers,
        sizes: OpenSizes,
        *,
        checks: Checks | None = None,
        varied: frozenset[str] | None = None,
    ) -> None:
        self.made: list[Decided] = []
        self.varied, self.numbers, self.sizes = varied, numbers, sizes
        self._prefix: Prefix = Prefix(tape, real_of, checks)
        self._tape = tape
        self._by_entry: dict[Entry, Decided] = {}
        self._varying: set[Entry] = set()
        self._contents: dict[Entry, torch.Tensor] = {}
        # The symbolic integer in a tensor, by the tensor's entry; None where the integer is plain.
        self._integers: dict[Entry, object] = {}

    def refuse(self, error: Exception) -> None:
        """The capture fails by `error`, whoever catches it meanwhile."""
        self._prefix.failed = self._prefix.failed or error

    def raise_failed(self) -> None:
        """Raise for a check that failed, whoever has caught that meanwhile."""
        if self._prefix.failed is not None:
            raise self._prefix.failed

    def item(self, entry: Entry, where: str, emit: Emit) -> Any:
        """The number in a tensor of one element."""
        known = self._by_entry.get(entry)
        dtype = _dtype_of(entry)
        if entry.target is not None and dtype is not None and dtype.is_floating_point:
            self.differs(where)  # a computed number: a loss, a norm
        if known is None and self.varied is not None and (where in self.varied or entry in self._varying):
            self._varying.add(entry)  # a graph decides on it at one line, though further lines read it
            value = self.value(entry, where).item()
            if type(value) is float and math.isfinite(value):
                return self.numbers.float(emit(aten._local_scalar_dense.default, entry), value, where)
            number = self._integer(entry, value, where, emit) if type(value) is int else None
            if number is not None:
                return number
        if known is None:
            known = self.add(Decided(entry, self.value(entry, where).item(), where))
        return known.value

    def differs(self, where: str) -> None:
        """Note that a number read there differs in the next call, before a graph holds the present number."""
        if self.varied is not None and where not in self.varied:
            raise NumberVaries(where)

    def _integer(self, entry: Entry, value: int, where: str, emit: Emit) -> object:
        """The symbol of an integer that the graph reads; None where it can't be one."""
        if entry not in self._integers:
            number = self.numbers.integer(value, where)
            if number is not None:
                self._found(emit(aten._local_scalar_dense.default, entry), value, number.plain(), where)
            self._integers[entry] = number
        return self._integers[entry]

    def _found(self, entry: Entry, value: int, number: object, where: str) -> None:
        """`entry` of the graph finds the symbolic integer `number`, `value` in the present call."""
        self.sizes.made[entry] = number
        self.add(Decided(entry, value, where, is_tensor=False, symbol=symbol_made(number)))

    def decide(self, entry: Entry, value: object, where: str) -> Any:
        """`value`, from a number's entry, is a part of the program from now on."""
        known = self._by_entry.get(entry)
        return (known or self.add(Decided(entry, value, where, is_tensor=False))).value

    def found_or_decided(self, entry: Entry, value: Any, where: str) -> Any:
        """The result of arithmetic on numbers: a symbol for an integer in the range of symbols; else decided on."""
        is_known = type(value) is not int or self.varied is None or entry in self._by_entry
        number = None if is_known else self.numbers.integer(value, where)
        if number is None:
            return self.decide(entry, value, where)
        self._found(entry, value, number.plain(), where)
        return number

    def number(self, entry: Entry, where: str) -> Any:
        """The result of an operator that returns no tensor."""
        return self.add(Decided(entry, self.value(entry, where), where, is_tensor=False)).value

    def contents(self, entry: Entry, where: str, emit: Emit) -> torch.Tensor:
        """All of a tensor, read at once."""
        if entry not in self._contents:
            value = self.value(entry, where)
            with plain_execution():
                real: torch.Tensor = value.clone()
            self._contents[entry] = real
            expected = self._tape.append(Entry(None, spec=entry.spec))
            expected.constant = expected.value = real
            self.add(Decided(emit(aten.equal.default, entry, expected), True, where, is_tensor=False))
        return self._contents[entry]

    def value(self, entry: Entry, where: str) -> Any:
        """The value of `entry` in the present call; `UnsupportedDataDependentError` when it can't be known yet."""
        try:
            return self._prefix.value(entry)
        except UnknownValue as unknown:
            raise UnsupportedDataDependentError(
                f"the value read at {where} depends on {unknown}, unknown during the capture. Use torch.where or "
                "masking in place of the branch, pass the number as an argument, or keep this part outside the "
                "compiled function."
            ) from None

    def supply(self, entry: Entry, value: object) -> None:
        """An operator with effects has run already, and gave this."""
        self._prefix.values[entry] = value

    def drawing(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Context: draws on the tensors' devices are the draws that the call is going to make."""
        return self._prefix.drawing({torch.device("cpu"), *(tensor.device for tensor in tensors)})

    def sized(self, entry: Entry, where: str, emit: Emit) -> Any:
        """The result of an operator with sizes that depend on values, with specs in place of tensors.

        The size becomes a decision, or stays open (see sizes.py).
        """
        try:
            result = self._prefix.value(entry)
        except UnknownValue:
            # In a backward the numbers come from outside, but the mask that picks some numbers doesn't.
            picked = self.sizes.picked(entry)
            if picked is not None:
                return picked
            masks = _masks_of(entry)
            if masks is None:
                self.value(entry, where)
                raise
            result = self._picked(entry, where)
            for mask in masks:
                self.item(emit(aten.sum.default, mask), where, emit)
            return result
        opened = self.sizes.open(entry, result, where)
        if opened is None:
            self.sizes.remember(entry, result)
            entry.target = SizedCall(entry.target, shapes_of(result))
            entry.spec = spec_of_value(result)
        else:
            entry.target, entry.spec = opened.target, opened.specs
        self._decide_numbers(entry, result, where, emit)
        path, first = _first_tensor(result)
        if opened is None:
            part = entry
            for step in path:
                part = emit(operator.getitem, part, step)
            size = emit(aten.sym_numel.default, part)
            self.add(Decided(size, first.numel(), where, is_tensor=False))
        elif opened.is_new:
            index, dim = opened.place
            part = entry if index is None else emit(operator.getitem, entry, index)
            size = emit(aten.sym_size.int, part, dim)
            self._found(size, first.numel(), opened.number, where)
        return _with_specs(result, entry.spec)

    def _decide_numbers(self, entry: Entry, result: object, where: str, emit: Emit) -> None:
        """Numbers that come beside tensors, as operators of the user's may return them."""
        if not isinstance(result, (tuple, list)):
            return
        for index, item in enumerate(result):
            if isinstance(item, (bool, int, float, complex)):
                self.add(Decided(emit(operator.getitem, entry, index), item, where, is_tensor=False))

    def _picked(self, entry: Entry, where: str) -> torch.Tensor:
        """The picked elements, with zeros as their source."""
        source = entry.args[0].spec
        indices = map_entries(entry.args[1], lambda e: self.value(e, where))
        with plain_execution():
            zeros = torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device=source.device).zero_()
            assert entry.target is not None
            result: torch.Tensor = entry.target(zeros, indices)
            return result

    def add(self, decided: Decided) -> Decided:
        """One more value that the graph depends on."""
        self.made.append(decided)
        self._by_entry[decided.entry] = decided
        return decided


def _masks_of(entry: Entry) -> list[Entry] | None:
    """For picking elements by masks: the masks."""
    if entry.target is aten.index.Tensor:
        return [e for e in entries_in(entry.args[1]) if _dtype_of(e) in (torch.bool, torch.uint8)]
    return [entry.args[1]] if entry.target is aten.masked_select.default else None


def sized_by_values(target: object) -> bool:
    """Whether the size of an operator's result is known to depend on values."""
    return isinstance(target, (SizedCall, OpenCall)) or (isinstance(target, OpOverload) and depends_on_values(target))


def _with_specs(result: object, specs: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(_with_specs(item, spec) for item, spec in zip(result, specs, strict=True))
    return specs if isinstance(result, torch.Tensor) else result


def _first_tensor(result: Any) -> tuple[tuple[int, ...], torch.Tensor]:
    """(where it is among the results, the first tensor)."""
    if isinstance(result, torch.Tensor):
        return (), result
    return next(
        ((i, *index), tensor)
        for i, item in enumerate(result)
        if isinstance(item, (torch.Tensor, list, tuple)) and len(item)
        for index, tensor in [_first_tensor(item)]
    )


def _dtype_of(entry: Entry) -> torch.dtype | None:
    return entry.spec.dtype if isinstance(entry.spec, TensorSpec) else None


# -------------------------------------------------------------------- decisions of derivatives
# The values that were read on the way to a derivative, and the values that the derivative itself reads.
#
# The arguments are not kept beyond the capture, only the values read of them: these hold whenever a derivative runs, as
# the forward's runtime has looked. A value that only the derivative reads is computed, at its capture, from its first
# call's saved values and tangents, and becomes a decision of its own.


AtHand = Callable[[], Mapping[int, Any]]  # real values by value number


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """The facts of all runs of a function: values that were read, and operators with sizes that were read."""

    values: tuple[Decided, ...]
    sized: tuple[Entry, ...]


class KnownDecisions(Decisions):
    """The decisions of each derivative in turn; `of_capture`: the function's own decisions."""

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
        """The known facts when the derivative runs."""
        return Known((*self._known.values, *self.made), (*self._known.sized, *self._sized))

    def item(self, entry: Entry, where: str, emit: Any) -> Any:
        return self._read_before(entry, lambda: super(KnownDecisions, self).item(entry, where, emit))

    def number(self, entry: Entry, where: str) -> Any:
        return self._read_before(entry, lambda: super(KnownDecisions, self).number(entry, where))

    def _read_before(self, entry: Entry, otherwise: Callable[[], object]) -> Any:
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
        self.numbering.renumber(entry)  # a second derivative may have found a different size
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
        """A key that is equal for entries with results of equal sizes; None where the sizes are unknown."""
        target = entry.target.op if isinstance(entry.target, (SizedCall, OpenCall)) else entry.target
        if not sized_by_values(entry.target):
            return None
        if _masks_of(entry):
            spec = entry.args[0].spec
            return target, self.numbering.key(spec.shape), spec.dtype, self.numbering.key(entry.args[1])
        return target, self.numbering.key(entry.args), self.numbering.key(entry.kwargs)


class _PrefixAtHand(Prefix):
    """The tape, run from the values that a call of the derivative has at hand."""

    def __init__(self, numbering: Numbering, at_hand: AtHand) -> None:
        super().__init__(numbering.tape, lambda _entry: None)
        self.numbering, self.at_hand = numbering, at_hand
        self.by_number: Mapping[int, object] | None = None
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
            raise UnknownValue("the contents of a fake tensor (it has none)")
        return value

    def _call(self, entry: Entry) -> Any:
        if entry.has_effect:
            raise UnknownValue("a random number")
        return super()._call(entry)

    def _leaf(self, entry: Entry) -> torch.Tensor:
        if entry.constant is None:
            raise UnknownValue("a gradient that comes in from outside, or a value that was not saved")
        return super()._leaf(entry)
