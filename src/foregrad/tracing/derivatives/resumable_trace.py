"""A captured function that can be differentiated again, and what comes of it: data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ...graph.joint import JointGraph
from ...graph.meta import TensorSpec
from ...graph.slots import Slot
from ...identity import ById
from ..tape.tape import Entry, Tape
from ..values.decisions import Known
from .session import Session

aten = torch.ops.aten

# Operators whose first argument is read by their derivative only when that is to be differentiated: it then starts
# from the matrix, otherwise from its factors.
_READ_AGAIN = {
    aten._linalg_solve_ex.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRef:
    """Where a value is: `kind` is "input", "saved", "tangent", "output", "result" or "live", `index` the position among
    these.

    A result is an output of the function differentiated that it saves for itself: its value and its history. What is
    live is an input that the backward writes to, as it is when the backward runs.
    """

    kind: str
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class WrappedRef:
    """A wrapper subclass like `spec` of plain tensors in these places."""

    spec: Any
    parts: tuple[ValueRef, ...]


GradientRef = ValueRef | WrappedRef


@dataclasses.dataclass(frozen=True, slots=True)
class Derivative:
    """The backward of a function as a function of its own, with a backward.

    `feeds`: where each of its inputs is found: an input of the function differentiated (for its history, and for its
    value where that was saved), a saved value or a tangent. `gradients`: for each input of the function
    differentiated, the output or the tangent that is its gradient, or None; `stops` the same for the outputs that it
    stops at. `whole`: for wrapper subclasses among these inputs, by their first, whose gradients are not those of their
    plain tensors.
    """

    joint: JointGraph
    resumable: ResumableTrace
    feeds: tuple[ValueRef, ...]
    gradients: tuple[GradientRef | None, ...]
    stops: tuple[GradientRef | None, ...] = ()
    whole: Mapping[int, GradientRef] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ResumableTrace:
    """A captured function that can be differentiated again.

    `outputs`: the fakes of its differentiable outputs, their slots and the layouts of their tangents. `inputs`,
    `leaves`, `input_slots`: for each of its inputs the entry on the tape, the fake that its gradient is taken at (None:
    it gets none) and its slot. `random`: the random operators of its graph, by node name. `read_again`: the nodes
    whose values eager keeps for a second derivative alone. `known`: the values that were read on the way to it.
    `valueless`: inputs that are there for their history only. `versions`: see `BackwardWrites`, once it has run.
    `made`: the wrapper subclasses that outputs are the plain tensors of, by the positions of these. `wrappers`: edges
    of autograd's graph to wrapper subclasses among the inputs, by the positions of their plain tensors.
    """

    session: Session
    outputs: tuple[torch.Tensor, ...]
    output_slots: tuple[Slot, ...]
    tangent_specs: tuple[TensorSpec, ...]
    inputs: tuple[Entry, ...]
    leaves: tuple[torch.Tensor | None, ...]
    input_slots: tuple[Slot, ...]
    random: dict[str, Entry]
    read_again: frozenset[str]
    known: Known
    valueless: frozenset[int] = frozenset()
    versions: ById[torch.Tensor, int] = dataclasses.field(default_factory=ById)
    made: Mapping[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)
    wrappers: Mapping[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)


def read_again(tape: Tape) -> frozenset[str]:
    """The nodes made from a tape whose values only a second derivative reads."""
    return frozenset(
        entry.args[0].name
        for entry in tape.with_operator(_READ_AGAIN.__contains__)
        if isinstance(entry.args[0], Entry) and entry.args[0].name is not None
    )
