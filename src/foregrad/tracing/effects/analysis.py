"""What is found out about a function once it has run: its graph outputs, and what a call makes of them."""

from __future__ import annotations

import dataclasses

import torch

from ..._torch.tensors import history_of
from ...graph.effect_log import Effect, Handle, Recorded, ViewStep, Write, WriteWrapper
from ...graph.effects import CheckInfo, Given, Result
from ...graph.meta import TensorSpec
from ...graph.signature import DecisionInfo, OutputInfo
from ...graph.slots import Checked, Decision, Slot
from ...identity import ById
from ..heap.alias import Storage, Value
from ..heap.records import InputRecord
from ..inputs.inputs import Inputs
from ..kernels.checks import Check
from ..recorder.recorder import Recorder
from ..tape.tape import Entry
from ..values.decisions import Decided


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """A tensor that was an input's, or still is: since which swap of its memory, until when (0: it still is)."""

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
    whole_updates: list[tuple[InputRecord, int]] = dataclasses.field(default_factory=list)  # of shared memories
    first: set[int] = dataclasses.field(default_factory=set)  # inputs that are written before their sizes change
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
    wrapper_histories: list[WriteWrapper] = dataclasses.field(default_factory=list)  # `input` counts the wrappers
    decisions: list[DecisionInfo] = dataclasses.field(default_factory=list)
    checks: list[CheckInfo] = dataclasses.field(default_factory=list)
    inference: dict[int, bool] = dataclasses.field(default_factory=dict)  # graph outputs: made in inference mode?
    by_fake: ById[torch.Tensor, int] = dataclasses.field(default_factory=ById)  # graph output

    def written_dtypes(self) -> set[torch.dtype]:
        """The dtypes of what is written with a history."""
        return {self.specs[update.output].dtype for update in self.updates if update.differentiable}

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
