"""A function's results after its run: the graph's outputs, and how a call gives them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..._torch.tensors import history_of
from ...graph.effect_log import CheckInfo, Given, Recorded, Result
from ...graph.meta import TensorSpec
from ...graph.signature import DecisionInfo, OutputInfo
from ...graph.slots import Checked, Decision, Slot
from ...identity import ById
from ..heap.alias import Storage
from ..heap.records import InputRecord
from ..kernels.checks import Check
from ..recorder.recorder import Recorder
from ..tape.tape import Entry
from ..values.decisions import Decided


@dataclasses.dataclass(slots=True)
class GraphResult:
    """A graph output: its slot, its value and its metadata. `carrier`: the autograd tensor, if it has gradients."""

    slot: Slot
    entry: Entry
    spec: TensorSpec
    carrier: torch.Tensor | None


class GraphResults(list[GraphResult]):
    """The graph outputs of a function. `by_fake`: the number of the output that gives a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by_fake: ById[torch.Tensor, int] = ById()

    def add(self, slot: Slot, entry: Entry, spec: TensorSpec, fake: torch.Tensor | None) -> int:
        """One more graph output; returns its number."""
        carries = fake is not None and fake.requires_grad and history_of(fake) is not None
        self.append(GraphResult(slot, entry, spec, fake if carries else None))
        if fake is not None:
            self.by_fake[fake] = len(self) - 1
        return len(self) - 1

    def carrying_gradients(self) -> dict[int, torch.Tensor]:
        """The graph outputs that autograd has a history of, with their tensors."""
        return {i: one.carrier for i, one in enumerate(self) if one.carrier is not None}

    def decisions(self, made: list[Decided]) -> tuple[DecisionInfo, ...]:
        """Values that the program read become graph outputs, behind all others."""
        found = []
        for one in made:
            out = self.add(Decision(one.where, one.symbol is not None), one.entry, one.entry.tensor, None)
            found.append(DecisionInfo(out, one.value, one.where, one.is_tensor, one.symbol))
        return tuple(found)

    def checks(self, made: list[Check], records: list[InputRecord]) -> tuple[CheckInfo, ...]:
        """The arguments of operators without results become graph outputs, unless they are inputs or outputs."""
        known: dict[Entry, Given | Result] = {one.entry: Result(i) for i, one in enumerate(self)}
        known |= {record.entry: Given(i) for i, record in enumerate(records)}
        checks = [check for check in made if not check.in_backward]
        for check in checks:
            for entry in check.entries():
                if entry not in known:
                    known[entry] = Result(self.add(Checked(check.where), entry, entry.tensor, None))
        return tuple(check.info(lambda entry: known[entry]) for check in checks)


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """How a call gives its results back: the graph's outputs, the function's `outputs`, and the `log` of a call's
    effects on inputs, results and views. `inference`: the graph outputs made in inference mode, or not; `storages`: the
    memories that outputs are views of.
    """

    graph: GraphResults
    outputs: list[OutputInfo]
    log: list[Recorded]
    inference: dict[int, bool]
    storages: frozenset[Storage]

    def aliases(self, leaves: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
        """The function's outputs that a call takes as views, with their tensors."""
        return [(i, leaves[i]) for i, info in enumerate(self.outputs) if getattr(info, "steps", ())]

    def shows(self, recorder: Recorder, *tensors: torch.Tensor) -> bool:
        """Whether the caller can reach one of the tensors, or its memory."""
        values = [recorder.value_of(tensor).root for tensor in tensors]
        given = {recorder.value_of(fake).root.storage for fake in self.graph.by_fake} | self.storages
        return any(value.storage.is_input or value.storage in given for value in values)
