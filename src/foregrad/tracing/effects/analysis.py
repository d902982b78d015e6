"""What is found out about a function once it has run: its graph outputs, and what a call makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..._torch.tensors import allows_writes, history_of, is_view
from ...graph.effect_log import (
    CheckInfo,
    Effect,
    Given,
    Handle,
    MarkRequiresGrad,
    Recorded,
    Result,
    SetData,
    TakeView,
    ViewStep,
    Write,
)
from ...graph.meta import TensorSpec
from ...graph.signature import DecisionInfo, OutputInfo
from ...graph.slots import Checked, Decision, Slot
from ...identity import ById
from ..heap.alias import Storage, Value, chain_of
from ..heap.metadata_changes import Event, toggles
from ..heap.records import InputRecord, is_moved
from ..heap.refusals import of_exchanged_memory
from ..heap.views import View
from ..inputs.inputs import Inputs
from ..kernels.checks import Check
from ..recorder.recorder import Recorder
from ..tape.tape import Entry
from ..values.decisions import Decided


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """A tensor that was an input's, or still is: before its memory was first swapped (epoch 0), until when, or after
    the last swap (1), or without any.
    """

    input: int
    is_current: bool
    epoch: int
    until: int


@dataclasses.dataclass(frozen=True, slots=True)
class BaseOutput:
    """A value that outputs are views of, the graph output that gives it, and the steps from that to the value.

    `leaf`: it is made to require grad by itself. `detached`: it is detached, and has its history until then.
    """

    value: Value
    output: int
    back: tuple[ViewStep, ...]
    leaf: bool = False
    detached: bool = False


@dataclasses.dataclass(slots=True)
class Analysis:
    """What `analyze` finds. `fakes[i]` is the autograd tensor of graph output i, when it carries gradients. `bases`: by
    a storage that is no input's, what gives it.
    """

    recorder: Recorder
    inputs: Inputs
    bases: dict[Storage, BaseOutput] = dataclasses.field(default_factory=dict)
    slots: list[Slot] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    specs: list[TensorSpec] = dataclasses.field(default_factory=list)
    fakes: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    updates: list[Write] = dataclasses.field(default_factory=list)
    detached: set[int] = dataclasses.field(default_factory=set)  # inputs that are written with a history before that
    early: list[Recorded] = dataclasses.field(default_factory=list)  # views of inputs that are taken, and marked
    replaced: list[int] = dataclasses.field(default_factory=list)  # inputs that are other tensors now
    swaps: list[Recorded] = dataclasses.field(default_factory=list)  # how they came to be that
    starts: dict[Value, Start] = dataclasses.field(default_factory=dict)
    of_swapped: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # see `is_of_swapped`
    started: int = 0  # how many inputs `starts` is about
    counted: list[int] = dataclasses.field(default_factory=list)
    counted_along: list[int] = dataclasses.field(default_factory=list)
    outputs: list[OutputInfo] = dataclasses.field(default_factory=list)
    aliases: list[tuple[int, torch.Tensor]] = dataclasses.field(default_factory=list)  # those of `outputs`, fakes
    of_results: list[Recorded] = dataclasses.field(default_factory=list)  # what happens to results, or to their views
    views: list[Recorded] = dataclasses.field(default_factory=list)  # when those that are returned were taken
    histories: list[Recorded] = dataclasses.field(default_factory=list)  # of views of inputs, which have their own
    decisions: list[DecisionInfo] = dataclasses.field(default_factory=list)
    checks: list[CheckInfo] = dataclasses.field(default_factory=list)
    inference: dict[int, bool] = dataclasses.field(default_factory=dict)  # graph outputs: made in inference mode?
    by_fake: ById[torch.Tensor, int] = dataclasses.field(default_factory=ById)  # graph output

    def carrying_gradients(self) -> list[int]:
        """The graph outputs that autograd has a history of."""
        return [i for i, fake in enumerate(self.fakes) if fake is not None]

    def happens(self, at: int, effect: Effect) -> None:
        """It happens to a result, or to a view that is one, at that time."""
        if all(entry.effect != effect for entry in self.of_results):
            self.of_results.append(Recorded(at, effect))

    def is_of_swapped(self, info: Handle) -> bool:
        """Whether a view of an input is one of memory that this was given in the call."""
        return bool(info.steps) and (info.input, info.steps[0].call) in self.of_swapped

    def add(self, slot: Slot, entry: Entry, spec: TensorSpec, fake: torch.Tensor | None) -> int:
        """One more graph output."""
        self.slots.append(slot)
        self.entries.append(entry)
        self.specs.append(spec)
        self.fakes.append(fake if fake is not None and _carries_gradients(fake) else None)
        if fake is not None:
            self.by_fake[fake] = len(self.slots) - 1
        return len(self.slots) - 1

    def add_decisions(self, made: list[Decided]) -> None:
        """Values that the program read become graph outputs, behind all others."""
        for decided in made:
            out = self.add(Decision(decided.where, decided.symbol is not None), decided.entry, decided.entry.spec, None)  # type: ignore[arg-type]
            info = DecisionInfo(out, decided.value, decided.where, decided.is_tensor, decided.symbol)
            self.decisions.append(info)

    def add_checks(self, made: list[Check], records: list[InputRecord]) -> None:
        """What operators without results are given becomes graph outputs, unless it is an input or one of them."""
        known: dict[Entry, Given | Result] = {entry: Result(i) for i, entry in enumerate(self.entries)}
        known |= {record.entry: Given(i) for i, record in enumerate(records)}
        for check in made:
            if not check.in_backward:
                for entry in check.entries():
                    if entry not in known:
                        out = self.add(Checked(check.where), entry, entry.spec, None)  # type: ignore[arg-type]
                        known[entry] = Result(out)
                self.checks.append(check.info(lambda entry: known[entry]))


def _carries_gradients(fake: torch.Tensor) -> bool:
    return fake.requires_grad and history_of(fake) is not None


# -------------------------------------------------------------------- handles
# Handles: which input or graph output a tensor is a view of, by which steps, and when these have to be taken.
#
# An input that was given other memory is the same input since: which of the memories a view is of is told by the steps
# and by when the first of them was taken.


aten = torch.ops.aten


def last_swap(recorder: Recorder, record: InputRecord) -> Value:
    """What an input is since it was last given other memory."""
    after = recorder.changes.log.of(record.stand_in, SetData)[-1].after
    assert after is not None
    return after


def _start_of(analysis: Analysis, value: Value) -> tuple[Value, Start] | None:
    """The nearest tensor on the way from a value to its root that is an input's, or was; None where there is none."""
    records = analysis.inputs.records
    if analysis.started != len(records):
        analysis.starts, analysis.started = _starts(analysis.recorder, records), len(records)
    at: Value | None = value
    while at is not None and at not in analysis.starts:
        at = at.parent
    return None if at is None else (at, analysis.starts[at])


def _starts(recorder: Recorder, records: list[InputRecord]) -> dict[Value, Start]:
    starts: dict[Value, Start] = {}
    for index, record in enumerate(records):
        current = recorder.values[record.stand_in]
        swaps = recorder.changes.log.of(record.stand_in, SetData)
        begins = {event.after for event in swaps}
        for epoch, first in enumerate([record.initial, *(event.after for event in swaps[-1:])]):
            until = swaps[0].at if swaps and not epoch else 0
            was: Value | None = first
            while was is not None and (was is first or was not in begins) and was.storage is first.storage:  # type: ignore[union-attr]
                starts.setdefault(was, Start(index, was is current, epoch, until))
                was = was.became
    return starts


def alias_of_input(analysis: Analysis, value: Value, path: str) -> Handle | None:
    """A view of an input, from what the input is after the call."""
    found = _start_of(analysis, value)
    if found is None:
        return None
    at, start = found
    steps = steps_between(value, at)
    early = _early_views(analysis, value, found, Handle(path, start.input, None, steps))
    analysis.early += early
    if start.epoch:
        analysis.of_swapped |= {(start.input, step.call) for step in steps[:1]}
    # The input's own sizes have changed since: start from the memory layout it had. One to be replaced still has it.
    if not start.is_current and not early and (start.input not in analysis.replaced or not steps):
        steps = (as_it_was(at), *steps)
    return Handle(path, start.input, None, steps)


def memory_of(analysis: Analysis, value: Value, path: str) -> Handle:
    """The memory that a tensor took over, which is `value` since."""
    if value.parent is not None:
        found = _start_of(analysis, value.parent)
        if found is not None:
            at, start = found
            source = Handle(path, start.input, None, steps_between(value, at))
            analysis.early += _early_views(analysis, value, found, source)
            return source
    if value.storage.is_input:
        raise of_exchanged_memory(path)
    base = analysis.bases[value.storage]
    return Handle(path, None, base.output, (*base.back, *steps_between(value, base.value)))


# -------------------------------------------------------------------- steps


def steps_between(value: Value, base: Value) -> tuple[ViewStep, ...]:
    """The way from `base` to `value`."""
    return tuple(_step(value) for value in _values_between(value, base))


def taken(handle: Handle, value: Value) -> list[Recorded]:
    """The views on the way to `handle`, each as of when the function took it. `value`: what `handle` names."""
    found = []
    for count, link in zip(range(len(handle.steps), 0, -1), chain_of(value), strict=False):
        if link.view is None or handle.steps[count - 1].call != id(link.view.call):
            break
        found.append(Recorded(link.born, TakeView(path=handle.path, **place_of(handle, count))))
    return found


def place_of(handle: Handle, count: int | None = None) -> dict[str, Any]:
    """The fields of an entry that say what it happens to: the view that the first `count` steps lead to."""
    input = -1 if handle.input is None else handle.input
    return {"input": input, "result": handle.output, "steps": handle.steps[:count]}


def marked_at(recorder: Recorder, tensor: torch.Tensor, value: Value) -> int:
    """When `requires_grad_()` was last called on it; when it was made, where its maker said so."""
    return max((event.at for event in recorder.changes.log.of(tensor, MarkRequiresGrad)), default=value.born)


def _values_between(value: Value, base: Value) -> list[Value]:
    chain = chain_of(value)
    if base not in chain:
        raise of_exchanged_memory("an output")
    return chain[: chain.index(base)][::-1]


def _step(value: Value) -> ViewStep:
    view = value.view
    assert isinstance(view, View)
    return ViewStep(view.op, view.args, tuple(view.kwargs.items()), view.index, id(view.call), view.grad_enabled)


def _early_views(analysis: Analysis, value: Value, origin: tuple[Value, Start], handle: Handle) -> list[Recorded]:
    """Entries for views that must be taken before what happens later, with the marks on them: views on the way from the
    tensor of an input, `origin`, to `value`. `handle` names `value`.
    """
    recorder, inputs, (base, start) = analysis.recorder, analysis.inputs, origin
    record = inputs.records[start.input]
    is_marked = record.stand_in.requires_grad and not record.real.requires_grad
    is_marked = is_marked or record.is_marked
    marked = [event for event in recorder.changes.log.events if _is_mark_of_view(event, value)]
    toggled_at = max(start.until, *(event.at for event in (*toggles(recorder, record), *marked)), 0)
    at_start = base is record.initial
    detached_at = record.detached_at
    # Of one of several views made at once none may be taken once a version moves, be it of other memory by now.
    is_one_of_several = is_view(record.real) and not allows_writes(record.real)
    changes = [change.at for change in value.storage.changes_of(record.stand_in)]
    counts_elsewhere = is_one_of_several and is_moved(record) and not changes
    found: list[Recorded] = []
    above: ViewStep | None = None
    early: tuple[int, bool, bool] | None = None  # when it is taken, and see `TakeView`
    for count, (taken, step) in enumerate(zip(_values_between(value, base), handle.steps, strict=True), start=1):
        before, early = early, None
        if is_marked and not taken.of_differentiable:
            was_changed = bool(changes) and changes[0] < taken.born
            early = taken.born, True, not was_changed or (at_start and taken.born < changes[-1])
        elif taken.born < max([*changes, toggled_at]) or counts_elsewhere:
            early = taken.born, False, False
        # Of a view that was taken under no_grad none may be taken, but under no_grad, once its base is written.
        if before is not None and above is not None and step.grad_enabled and not above.grad_enabled:
            is_barred = any(before[0] < at < taken.born for at in changes)
            early = before if is_barred and detached_at is None and not (is_marked or marked) else early
        if early is None:
            break
        at, of_plain, first = early
        where = place_of(handle, count)
        found.append(Recorded(at, TakeView(path=handle.path, of_plain=of_plain, first=first, **where)))
        own = [event for event in marked if event.value is taken and event.tensor not in inputs.by_stand_in]
        found += [Recorded(event.at, MarkRequiresGrad(**where)) for event in own]
        above = step
    return found


def _is_mark_of_view(event: Event, value: Value) -> bool:
    """Whether a view in the memory of `value` was made to require grad."""
    view = event.value.view
    if not isinstance(event.effect, MarkRequiresGrad) or view is None or view.is_member:
        return False
    return event.value.storage is value.storage


def as_it_was(value: Value) -> ViewStep:
    """The step back to the sizes `value` had, from any tensor in the same memory."""
    spec = value.spec
    where = (list(spec.shape), list(spec.stride), spec.offset)
    return ViewStep(aten.as_strided.default, where, (), None, id(value), True)
