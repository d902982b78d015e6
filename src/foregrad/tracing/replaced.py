"""Inputs that take another tensor's memory over: `set_`, and assignments to `.data`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._torch.tensors import allows_writes, base_of, history_of, is_usable, is_view
from ..errors import UnsupportedMutationError
from ..graph.signature import AliasOutput, OutputInfo, Replacement
from ..graph.slots import Updated
from .inputs import InputRecord
from .recorder import Recorder

if TYPE_CHECKING:
    from .outputs import Analysis

__all__ = ["in_order", "is_set_again", "is_written_with_history", "replacement_of"]


def replacement_of(
    recorder: Recorder, found: Analysis, index: int, records: list[InputRecord], info: OutputInfo
) -> Replacement:
    record = records[index]
    stand_in = record.stand_in
    is_set = is_set_again(recorder, record)
    # What `set_` leaves behind between tensors that require grad: a history that can't be differentiated.
    is_barred = is_set and _name(history_of(stand_in)).endswith("NotImplemented")
    value = recorder.value_of(stand_in)
    sources = [recorder.values[id(r.stand_in)] for r in records] + [r.initial for r in records]
    if is_barred and value.parent not in sources:
        raise UnsupportedMutationError(
            f"`set_` gives {record.slot} the memory of a tensor that requires grad and is no argument itself; PyTorch "
            "can't differentiate what comes of it. Detach that tensor first."
        )
    history = None
    becomes_leaf = stand_in.requires_grad and is_usable(stand_in) and stand_in.is_leaf and not record.real.requires_grad
    if becomes_leaf and value.spec.shape != record.spec.shape:
        raise UnsupportedMutationError(
            f"{record.slot} takes over the memory of a tensor of another shape and is made to require grad; do either "
            "outside."
        )
    if is_written_with_history(record) and not is_barred:
        if is_set or is_view(stand_in):
            raise UnsupportedMutationError(
                f"{record.slot} takes over another tensor's memory and is written with gradients flowing through; "
                "write to a copy and return it instead."
            )
        history = found.add(Updated(record.slot), value.read(recorder.emit), value.spec, stand_in)
    return Replacement(index, info, is_set, is_barred, history)


def in_order(replacements: list[Replacement]) -> list[Replacement]:
    """What comes to view an input that is replaced itself comes after that one."""
    done: list[Replacement] = []
    waiting = list(replacements)
    while waiting:
        pending = {r.input for r in waiting}
        ready = [r for r in waiting if not (isinstance(r.value, AliasOutput) and r.value.after_replacement)]
        ready += [r for r in waiting if r not in ready and getattr(r.value, "input", None) not in pending]
        done += ready or waiting[:1]
        waiting = [r for r in waiting if r not in done]
    return done


def is_set_again(recorder: Recorder, record: InputRecord) -> bool:
    """Whether `set_` replaced the input, and may do so again: an input that is a leaf by then loses its gradient."""
    _, is_set = recorder.writes.replaced.get(id(record.stand_in), (None, False))
    return is_set and not (record.stand_in.requires_grad and record.stand_in.is_leaf)


def _name(history: Any) -> str:
    return "" if history is None else history.name()


def is_written_with_history(record: InputRecord) -> bool:
    """Whether autograd knows of a write: it then gave the tensor, or what it is a view of, another history."""
    stand_in = record.stand_in
    if not stand_in.requires_grad or not allows_writes(stand_in):
        return False
    tracked = base_of(stand_in) if is_view(stand_in) else stand_in
    assert tracked is not None
    if tracked.grad_fn is None:
        return False
    return bool(tracked.grad_fn._sequence_nr() != record.start_sequence_nr)
