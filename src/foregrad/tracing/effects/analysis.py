"""The findings about a function after its run: its graph outputs, and their use by a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..._torch.tensors import allows_writes, base_of, history_of, is_usable, is_view
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
)
from ...graph.meta import TensorSpec
from ...graph.signature import DecisionInfo, OutputInfo
from ...graph.slots import Checked, Decision, Slot
from ...identity import ById
from ..heap.alias import Storage, Value, chain_of
from ..heap.records import InputRecord, is_moved
from ..heap.refusals import of_exchanged_memory, taken_before
from ..heap.views import View
from ..inputs.inputs import Inputs
from ..kernels.checks import Check
from ..recorder.recorder import Recorder
from ..tape.opinfo import CUTS
from ..tape.tape import Entry
from ..values.decisions import Decided


@dataclasses.dataclass(frozen=True, slots=True)
class BaseOutput:
    """A value that outputs are views of, the graph output that gives it, and the steps from that to the value.

    `leaf`: it is made to require grad by itself. `tensor`: what the function knows it as, where it does.
    """

    value: Value
    output: int
    back: tuple[ViewStep, ...]
    leaf: bool = False
    tensor: torch.Tensor | None = None


@dataclasses.dataclass(slots=True)
class Analysis:
    """What `analyze` finds. `fakes[i]` is the autograd tensor of graph output i, when it carries gradients. `bases`: by
    a storage that is no input's, what gives it. `log`: what a call does to inputs, results and views, when.
    """

    recorder: Recorder
    inputs: Inputs
    bases: dict[Storage, BaseOutput] = dataclasses.field(default_factory=dict)
    slots: list[Slot] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    specs: list[TensorSpec] = dataclasses.field(default_factory=list)
    fakes: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    log: list[Recorded] = dataclasses.field(default_factory=list)
    starts: dict[Value, Start] = dataclasses.field(default_factory=dict)
    outputs: list[OutputInfo] = dataclasses.field(default_factory=list)
    aliases: list[tuple[int, torch.Tensor]] = dataclasses.field(default_factory=list)  # those of `outputs`, fakes
    inference: dict[int, bool] = dataclasses.field(default_factory=dict)  # graph outputs: made in inference mode?
    by_fake: ById[torch.Tensor, int] = dataclasses.field(default_factory=ById)  # graph output

    def carrying_gradients(self) -> list[int]:
        """The graph outputs that autograd has a history of."""
        return [i for i, fake in enumerate(self.fakes) if fake is not None]

    def shows(self, *tensors: torch.Tensor) -> bool:
        """Whether the caller can reach one of the tensors, or its memory."""
        values = [self.recorder.value_of(tensor).root for tensor in tensors]
        given = {self.recorder.value_of(fake).root.storage for fake in self.by_fake} | self.bases.keys()
        return any(value.storage.is_input or value.storage in given for value in values)

    def happens(self, at: int, effect: Effect) -> None:
        """Log an effect on an input, a result or a view."""
        self.log.append(Recorded(at, effect))

    def add(self, slot: Slot, entry: Entry, spec: TensorSpec, fake: torch.Tensor | None) -> int:
        """One more graph output."""
        self.slots.append(slot)
        self.entries.append(entry)
        self.specs.append(spec)
        self.fakes.append(fake if fake is not None and fake.requires_grad and history_of(fake) is not None else None)
        if fake is not None:
            self.by_fake[fake] = len(self.slots) - 1
        return len(self.slots) - 1

    def decisions(self, made: list[Decided]) -> tuple[DecisionInfo, ...]:
        """Values that the program read become graph outputs, behind all others."""
        found = []
        for decided in made:
            out = self.add(
                Decision(decided.where, decided.symbol is not None), decided.entry, decided.entry.tensor, None
            )
            found.append(DecisionInfo(out, decided.value, decided.where, decided.is_tensor, decided.symbol))
        return tuple(found)

    def checks(self, made: list[Check], records: list[InputRecord]) -> tuple[CheckInfo, ...]:
        """What operators without results are given becomes graph outputs, unless it is an input or one of them."""
        known: dict[Entry, Given | Result] = {entry: Result(i) for i, entry in enumerate(self.entries)}
        known |= {record.entry: Given(i) for i, record in enumerate(records)}
        checks = [check for check in made if not check.in_backward]
        for check in checks:
            for entry in check.entries():
                if entry not in known:
                    known[entry] = Result(self.add(Checked(check.where), entry, entry.tensor, None))
        return tuple(check.info(lambda entry: known[entry]) for check in checks)


# -------------------------------------------------------------------- handles
# Handles: the input or graph output that a tensor is a view of, and the view's steps.
#
# A call takes views of inputs last, after all changes to the inputs. A view that would differ by then is refused: the
# input has new memory, or its `requires_grad` changed, since the function took the view.


aten = torch.ops.aten


class Start(NamedTuple):
    """The input with that value, now or before. `is_former`: before the input was given other memory."""

    input: int
    is_former: bool


def last_swap(recorder: Recorder, record: InputRecord) -> Value:
    """What an input is since it was last given other memory."""
    after = recorder.changes.log.of(record.stand_in, SetData)[-1].after
    assert after is not None
    return after


def starts_of(recorder: Recorder, records: list[InputRecord]) -> dict[Value, Start]:
    """The values of the inputs, also before sizes changed in place or other memory was given."""
    starts: dict[Value, Start] = {}
    for index, record in enumerate(records):
        is_given = bool(recorder.changes.log.of(record.stand_in, SetData))
        was: Value | None = record.initial
        while was is not None:
            starts[was] = Start(index, is_given)
            was = None if is_given else was.became
        if is_given:
            starts[last_swap(recorder, record)] = Start(index, False)
    return starts


def _start_of(analysis: Analysis, value: Value | None) -> tuple[Value, Start] | None:
    """The nearest value of an input on the way from a value to its root; None without one."""
    while value is not None and value not in analysis.starts:
        value = value.parent
    return None if value is None else (value, analysis.starts[value])


def alias_of_input(analysis: Analysis, value: Value, path: str) -> Handle | None:
    """A view of an input, from what the input is after the call."""
    found = _start_of(analysis, value)
    if found is None:
        return None
    at, start = found
    record = analysis.inputs.records[start.input]
    if start.is_former:
        raise of_exchanged_memory(f"the output {path}", analysis.recorder.changes.where(record.stand_in))
    whole = base_of(record.real)
    bases = (other.stand_in for other in analysis.inputs.records if whole is not None and other.real is whole)
    check_taken(analysis.recorder, value, at, (record.stand_in, *bases), path)
    steps = steps_between(value, at)
    # Several views made at once may not be used, and no view of them may be taken, once one of them is written: each
    # link is taken at its own time.
    is_barred = is_view(record.real) and not allows_writes(record.real) and is_moved(record)
    if is_barred or (value.fake is not None and not is_usable(value.fake)):
        for count, link in enumerate(_values_between(value, at), 1):
            analysis.happens(link.born, TakeView(start.input, path, steps=steps[:count]))
    elif at is not analysis.recorder.values[record.stand_in]:  # its sizes have changed since
        steps = (as_it_was(at), *steps)
    return Handle(path, start.input, None, steps)


def check_taken(recorder: Recorder, value: Value, base: Value, owners: Iterable[object], path: str) -> None:
    """Raise for a view, `value`, of `base`, if `requires_grad_()` or `detach_()` was called on a view between them, or
    on an owner after the view was taken. `owners`: the tensor that `base` was, and the one that this is a view of.
    """
    links = [base, *_values_between(value, base)]
    cut = max((at for at, link in enumerate(links) if link.view is not None and link.view.op in CUTS and at), default=0)
    for event in [event for event in recorder.changes.log.events if event.is_toggle and len(links) - cut > 1]:
        is_of_owner = any(event.tensor is owner for owner in owners) and not cut and event.at > links[1].born
        if is_of_owner or any(event.value is link for link in links[max(cut, 1) : -1]):
            raise taken_before(f"the output {path}", recorder.changes.where(event.tensor))


def memory_of(analysis: Analysis, value: Value, path: str) -> Handle:
    """The memory that a tensor took over, which is `value` since."""
    found = _start_of(analysis, value.parent)
    if found is not None:
        at, start = found
        source = Handle(path, start.input, None, steps_between(value, at))
        if start.is_former:  # taken while the input has that memory
            first = _values_between(value, at)[0]
            analysis.happens(first.born, TakeView(start.input, path, steps=source.steps[:1]))
        return source
    if value.storage.is_input:
        raise of_exchanged_memory(path)
    base = analysis.bases[value.storage]
    return Handle(path, None, base.output, (*base.back, *steps_between(value, base.value)))


# -------------------------------------------------------------------- steps


def steps_between(value: Value, base: Value) -> tuple[ViewStep, ...]:
    """The way from `base` to `value`."""
    return tuple(_step(value) for value in _values_between(value, base))


def place_of(handle: Handle) -> dict[str, Any]:
    """The fields of an entry for the affected tensor."""
    return {"input": -1 if handle.input is None else handle.input, "result": handle.output, "steps": handle.steps}


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


def as_it_was(value: Value) -> ViewStep:
    """The step back to the sizes `value` had, from any tensor in the same memory."""
    spec = value.spec
    where = (list(spec.shape), list(spec.stride), spec.offset)
    return ViewStep(aten.as_strided.default, where, (), None, id(value), True)
