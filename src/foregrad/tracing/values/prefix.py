"""The recorded prefix of a tape, run on the real arguments as far as the capture must know values.

Random operators of the prefix run once, in their order, on generators forked when the capture began: they draw the
numbers that the compiled call is going to draw, and the program's own generators stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..._torch.engine import default_generators, plain_execution
from ..._torch.fakes import is_absent
from ..._torch.nested import leaves
from ..._torch.ops import OpOverload
from ..._torch.random_operators import drawing_from
from ..._torch.stand_ins import is_stand_in
from ..._torch.symbols import concrete, has_symbolic, map_symbolic
from ...graph.effect_log import CheckFailed
from ...graph.meta import TensorSpec
from ..heap.recording import Recording
from ..kernels.checks import Check, Checks
from ..tape.opinfo import returns_tensors
from ..tape.tape import Entry, Tape, entries_in, map_entries


class UnknownValue(Exception):  # noqa: N818
    """Names the missing value; never leaves `Decisions`."""


class Prefix:
    """The tape, run on the real arguments as far as anybody asked."""

    def __init__(
        self, tape: Tape, real_of: Callable[[Entry], torch.Tensor | None], checks: Checks | None = None
    ) -> None:
        self.tape = tape
        self.real_of = real_of
        self.values: dict[Entry, Any] = {}
        self.at = 0  # up to here, every random operator has run
        self.checks = checks
        self.checked = 0  # up to here, every check has been made
        self.failed: Exception | None = None
        self.forks: dict[torch.Generator, torch.Generator] = {}

    def value(self, entry: Entry) -> Any:
        with plain_execution():
            entries = self.tape.entries
            while self.at < len(entries):
                if entries[self.at].has_effect:
                    self._run(entries[self.at])
                self.at += 1
            if self.checks is not None:
                self._check(self.checks.made)
            return self._run(entry)

    def _check(self, made: list[Check]) -> None:
        """Raise where eager has raised before the value is read: the call goes no further."""
        while self.checked < len(made):
            check = made[self.checked]
            self.checked += 1
            if check.in_backward or not check.info(lambda _: None).only_raises:
                continue
            try:
                for entry in check.entries():
                    self._run(entry)
                check.op(*map_entries(check.args, self._known), **map_entries(check.kwargs, self._known))
            except UnknownValue:
                continue
            except Exception as error:
                self.failed = CheckFailed(error)
                raise self.failed from None

    def known(self, entry: Entry) -> Any:
        """A value that need not be computed; None for any other."""
        return None

    def _run(self, entry: Entry) -> Any:
        for current in _to_run(entry, self._is_there):
            value = self._leaf(current) if current.target is None else self._call(current)
            if is_absent(value):
                raise UnknownValue("a tensor that has no values (it is on `meta`, or fake)")
            self.values[current] = value
        return self.values[entry]

    def _is_there(self, entry: Entry) -> bool:
        if entry not in self.values and (found := self.known(entry)) is not None:
            self.values[entry] = found
        return entry in self.values

    def _leaf(self, entry: Entry) -> torch.Tensor:
        if entry.constant is not None:
            constant: torch.Tensor = entry.constant
            return constant
        real = self.real_of(entry)
        if real is None:
            raise UnknownValue("a gradient that comes in from outside (it is read in the backward)")
        if is_stand_in(real):
            raise UnknownValue("the contents of a fake tensor (it has none)")
        return real

    def _call(self, entry: Entry) -> Any:
        assert entry.target is not None
        args = map_symbolic(map_entries(entry.args, self._known), concrete)
        kwargs = map_symbolic(map_entries(entry.kwargs, self._known), concrete)
        if not entry.has_effect:
            return entry.target(*args, **kwargs)
        if entry.once:
            if entry.is_backward or self.checks is None:
                raise UnknownValue("an operator of the backward that is to run once")
            for one in self.checks.recorder.host.aspects:
                one.ahead(entry)
        generators = _generators(entry)
        if len(generators) == 1:
            fork = self._fork_of(generators[0])
            draw = drawing_from(entry.target, fork) if isinstance(entry.target, OpOverload) else None
            if draw is not None:
                return draw(*args, **kwargs)
        with self._drawing(generators):  # this operator is known to draw from no other
            return entry.target(*args, **kwargs)

    def drawing(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """Context: the devices' generators are in their states at the call."""
        return self._drawing(default_generators(devices))

    @contextlib.contextmanager
    def _drawing(self, generators: list[torch.Generator]) -> Iterator[None]:
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.set_state(self._fork_of(generator).get_state())
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                self._fork_of(generator).set_state(generator.get_state())
                generator.set_state(state)

    def _fork_of(self, generator: torch.Generator) -> torch.Generator:
        """A generator with the draws that `generator` will make in the call."""
        fork = self.forks.get(generator)
        if fork is None:
            fork = self.forks[generator] = generator.clone_state()
        return fork

    def _known(self, entry: Entry) -> object:
        return self.values[entry]


def _to_run(entry: Entry, is_there: Callable[[Entry], bool]) -> list[Entry]:
    """The entry and its needs, in order, but for present values."""
    order: list[Entry] = []
    seen: set[Entry] = set()
    stack: list[tuple[Entry, bool]] = [(entry, False)]
    while stack:
        current, ready = stack.pop()
        if ready:
            order.append(current)
        elif current not in seen and not is_there(current):
            seen.add(current)
            stack.append((current, True))
            stack.extend((e, False) for e in (*entries_in(current.args), *entries_in(current.kwargs)))
    return order


def generators_drawn_from(entries: list[Entry]) -> tuple[torch.Generator, ...]:
    """The generators that the random operators among `entries` move."""
    drawing = (entry for entry in entries if entry.has_effect and not entry.once)
    return tuple(dict.fromkeys(generator for entry in drawing for generator in _generators(entry)))


def _generators(entry: Entry) -> list[torch.Generator]:
    given = [v for v in (*entry.args, *entry.kwargs.values()) if isinstance(v, torch.Generator)]
    if given:
        return given
    devices = dict.fromkeys(spec.device for spec in leaves(entry.spec) if isinstance(spec, TensorSpec))
    return default_generators(devices)


# -------------------------------------------------------------------- constants
# Values that depend on no input: computed while capturing when the program asks for them.
#
# A mask built from `torch.arange`, a number read out of a configuration tensor: the entries they need are run for
# real, on demand, and remembered; the entries on `meta` run on the CPU, and give numbers alone.


_LIMIT_BYTES = 1 << 28


def evaluate(recorder: Recording, func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[bool, Any]:
    """(True, result of `func`) when none of its arguments depends on an input or a random number."""
    entry_args = recorder.to_entries(args)
    entry_kwargs = recorder.to_entries(kwargs)
    operands = [*entries_in(entry_args), *entries_in(entry_kwargs)]
    if not all(map(is_constant, operands)):
        return False, None
    specs = [spec for operand in operands for spec in leaves(operand.spec) if isinstance(spec, TensorSpec)]
    if any(spec.device.type == "meta" for spec in specs) and (returns_tensors(func) or recorder.host.takes_output):
        return False, None  # a compiled call raises, as eager does; a capture foresees
    with torch.no_grad():
        real_args = map_entries(entry_args, evaluate_entry)
        real_kwargs = map_entries(entry_kwargs, evaluate_entry)
        return True, func(*real_args, **real_kwargs)


def is_constant(entry: Entry) -> bool:
    """Whether the value of an entry depends on no input and no random number."""
    seen: set[Entry] = set()
    stack = [entry]
    while stack:
        entry = stack.pop()
        if entry in seen:
            continue
        seen.add(entry)
        if entry.value is not None:
            continue
        if entry.target is None or entry.has_effect or not _has_few_bytes(entry.spec):
            return False
        if has_symbolic(entry.args) or has_symbolic(entry.kwargs):
            return False  # another length, another value
        stack.extend(entries_in(entry.args))
        stack.extend(entries_in(entry.kwargs))
    return True


def _has_few_bytes(spec: Any) -> bool:
    if isinstance(spec, tuple):  # of several results, where one may be a list
        return all(map(_has_few_bytes, spec))
    return spec is None or (type(spec.nbytes) is int and spec.nbytes <= _LIMIT_BYTES)


def evaluate_entry(entry: Entry) -> Any:
    """The real value of an entry that `evaluate` found to be constant."""
    for current in _to_run(entry, lambda e: e.value is not None):
        assert current.target is not None
        args = map_entries(current.args, lambda e: e.value)
        kwargs = map_entries(current.kwargs, lambda e: e.value)
        if kwargs.get("device") == torch.device("meta"):
            kwargs["device"] = torch.device("cpu")
        current.value = current.target(*args, **kwargs)
    return entry.value
