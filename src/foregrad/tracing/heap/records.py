"""A capture's knowledge of each input."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..._torch.tensors import allows_writes, base_of, is_marked, is_view, version_of
from ...graph.meta import TensorSpec
from ...graph.slots import SharedMemory, Slot
from ..tape.tape import Entry
from .alias import Value


class InputRecord:
    """One tensor input: the real tensor, its stand-in, the leaf its gradient is taken at, and its entry on the tape."""

    __slots__ = (
        "argument", "entry", "initial", "leaf", "real", "slot", "source", "spec", "stand_in", "start_sequence_nr",
        "start_version",
    )  # fmt: skip

    def __init__(self, real: torch.Tensor, slot: Slot, argument: int | None, source: object) -> None:
        self.real = real
        self.slot = slot
        self.argument = argument
        self.source = source  # a Source, or the record this is the base of
        self.spec = TensorSpec.of(real, real.device)
        self.entry = Entry(None, spec=self.spec)
        self.stand_in: torch.Tensor
        self.leaf: torch.Tensor | None  # None: the gradient goes to the tensor this is a view of
        self.initial: Value
        self.start_version = 0
        self.start_sequence_nr: int | None = None

    @classmethod
    def of_memory(cls, group: list[InputRecord], spec: TensorSpec, stand_in: torch.Tensor) -> InputRecord:
        """All of the memory that the tensors of `group` share, as one input."""
        record = cls(group[0].real, SharedMemory(tuple(r.slot for r in group)), None, None)
        record.spec, record.entry = spec, Entry(None, spec=spec)
        record.leaf = record.stand_in = stand_in
        record.initial = Value(None, record.entry, spec)
        record.initial.storage.is_input = True
        return record


@dataclasses.dataclass(frozen=True, slots=True)
class NumberRecord:
    """An argument that is a varying number: a symbolic integer, or a float that is read off a tensor."""

    entry: Entry
    argument: int
    slot: Slot
    number: Any
    real: torch.Tensor | None = None  # the float's tensor

    @property
    def type(self) -> type:
        return int if self.real is None else float


def is_moved(record: Any) -> bool:
    """Whether the function moved its version counter."""
    return not record.stand_in.is_inference() and version_of(record.stand_in) != record.start_version


def is_no_grad_view(record: InputRecord) -> bool:
    """Whether it is a view made under no_grad, marked through its base: PyTorch sends no gradients there."""
    base = base_of(record.real)
    return base is not None and base.requires_grad and is_marked(record.real)


def is_written_with_history(record: InputRecord) -> bool:
    """Whether autograd knows of a write: it then changed the history of the tensor or of its base."""
    stand_in = record.stand_in
    if not stand_in.requires_grad or not allows_writes(stand_in):
        return False
    tracked = base_of(stand_in) if is_view(stand_in) else stand_in
    assert tracked is not None
    if tracked.grad_fn is None:
        return False
    return bool(tracked.grad_fn._sequence_nr() != record.start_sequence_nr)
