"""Inputs that the function wrote to: what the graph gives them, which sizes they take on, whose versions move."""

from __future__ import annotations

import torch

from ..._torch.tensors import base_of, is_view, share_counters
from ...errors import UnsupportedAliasError, UnsupportedMutationError
from ...graph.signature import AliasOutput, MetadataWrite, Update
from ...graph.slots import Updated
from ..heap.records import InputRecord, is_moved, is_of_another_kind
from ..heap.writes import Writes
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from .analysis import Analysis
from .storage_swap import is_set_again, is_written_with_history

__all__ = [
    "WRITTEN_BY_LISTS",
    "add_counted",
    "add_metadata_writes",
    "add_updates",
    "check_histories",
    "check_resized",
    "written_through_bases",
]

WRITTEN_BY_LISTS = (
    "{} a view that a `_foreach_` operator at {} wrote to together with another tensor in its memory, with gradients: "
    "PyTorch gives the view gradients of one of the writes only. Write to them one by one, or to a copy."
)


def written_through_bases(inputs: Inputs) -> dict[int, int]:
    """{record: the record of the tensor it is a view of}, where writing to that gives the view its new history too."""
    through: dict[int, int] = {}
    for record in inputs.records:
        stand_in = record.stand_in
        base = inputs.by_stand_in.get(id(base_of(stand_in))) if is_view(stand_in) else None
        if (
            base is not None
            and _is_written(record)
            and is_written_with_history(record)
            and is_written_with_history(base)
        ):
            through[id(record)] = id(base)
    return through


def check_histories(found: Analysis, inputs: Inputs, through_bases: dict[int, int], writes: Writes) -> None:
    """Histories that can't be given back: of a view that an operator on lists wrote to together with what shares its
    memory, of a tensor whose view `set_` left without a derivative.
    """
    known = {update.input for update in found.updates if update.differentiable} | set(found.replaced)
    moved = {write.input for write in found.metadata_writes} - known
    set_views = {
        key: id(old.storage)
        for key, (old, is_set) in writes.replaced.items()
        if is_set and key not in inputs.by_stand_in
    }
    parted = set(set_views.values())
    returned = {id(leaf) for at, leaf in found.aliases if found.outputs[at].memory_is_barred}  # type: ignore[attr-defined]
    hidden = {storage for key, storage in set_views.items() if key not in returned}
    barred = [out for out in found.outputs if isinstance(out, AliasOutput) and out.memory_is_barred]
    inputs_of = {out.input for out in barred if out.input is not None}
    known |= {i for i in inputs_of if id(inputs.records[i].initial.storage) not in hidden}
    for index, record in enumerate(inputs.records):
        is_listed_view = id(record.stand_in) in writes.listed and is_view(record.real)
        if is_listed_view and is_written_with_history(record):
            raise UnsupportedAliasError(WRITTEN_BY_LISTS.format(f"{record.slot} is", writes.where(record.stand_in)))
        if index in known or id(record) in through_bases or is_view(record.stand_in):
            continue
        is_written = is_written_with_history(record)
        if index in moved:  # that gives another history by itself
            is_written &= id(record.initial.storage) in parted
        if is_written:
            raise UnsupportedMutationError(
                f"`set_` at {writes.where_set()} is called on a view of {record.slot}, with gradients on, "
                "which can't be given back: "
                f"PyTorch lets {record.slot} be differentiated no more. Use torch.no_grad(), or a detached view."
            )


def _is_written(record: InputRecord) -> bool:
    initial, storage = record.initial, record.initial.storage
    in_group = initial.parent is not None
    return (initial.is_written_through or storage.is_written_anywhere) if in_group else storage.is_written


def add_metadata_writes(recorder: Recorder, found: Analysis, index: int, record: InputRecord) -> bool:
    """Note changes of the input's sizes; whether it was replaced by another tensor."""
    writes = [w for w in recorder.writes.metadata_log if w[0] == id(record.stand_in)]
    current = recorder.values[id(record.stand_in)]
    if any(op in ("data", "set_") for _, op, _, _, _ in writes) or current.storage is not record.initial.storage:
        found.replaced.append(index)
        return True
    for _, op, args, kwargs, grad_enabled in writes:
        found.metadata_writes.append(MetadataWrite(index, op, args, tuple(kwargs.items()), grad_enabled))
    return False


def add_counted(recorder: Recorder, found: Analysis, records: list[InputRecord]) -> None:
    """Leave of those whose version moves one for each counter; the others move along with it."""
    counted = {update.input for update in found.updates if update.counted}
    written = {i for i in counted if records[i].spec.numel}
    unwritten = {write.input for write in found.metadata_writes} | (counted - written)
    unwritten |= {i for i in found.replaced if is_set_again(recorder, records[i])}
    candidates = [i for i in found.counted if not _counted_with(written, records, i)]
    found.counted = []
    for index in candidates:
        if not _counted_with({*unwritten, *found.counted} - {index}, records, index):
            found.counted.append(index)
    moving = {*unwritten, *found.counted}
    rest = [i for i, r in enumerate(records) if i not in {*written, *moving} and not r.real.is_inference()]
    found.counted_along = [i for i in rest if _counted_with(moving, records, i)]


def _counted_with(others: set[int], records: list[InputRecord], index: int) -> bool:
    """Whether moving the version of one of the others moves this one's, too."""
    moved = (records[i].real for i in others)
    return any(share_counters(real, records[index].real) for real in moved if not real.is_inference())


def add_updates(
    recorder: Recorder, found: Analysis, index: int, record: InputRecord, is_written_through_views: bool
) -> None:
    stand_in, initial = record.stand_in, record.initial
    current = recorder.values[id(stand_in)]
    written = _is_written(record) or is_written_through_views
    counted = is_moved(record)
    differentiable = written and is_written_with_history(record)
    resized = any(w[0] == id(stand_in) for w in recorder.writes.metadata_log)
    if add_metadata_writes(recorder, found, index, record):
        differentiable = False  # what it was before has no history any more
        counted = counted and not is_set_again(recorder, record)
    if not written or (counted and not differentiable and initial.storage.generation == 0):
        if counted and (index in found.replaced or not resized):
            found.counted.append(index)
        return
    if differentiable:
        check_resized(recorder, record)
    first = differentiable and resized and is_of_another_kind(record)
    if first:
        with recorder, torch.enable_grad():
            stand_in = stand_in.as_strided(record.spec.shape, record.spec.stride, record.spec.offset)
        recorder.kept.append(stand_in)
        current = recorder.value_of(stand_in)
    value = current if differentiable else initial
    out = found.add(Updated(record.slot), value.read(recorder.emit), value.spec, stand_in if differentiable else None)
    counted = counted or stand_in.is_inference()
    found.updates.append(Update(index, out, differentiable=differentiable, counted=counted, first=first))


def check_resized(recorder: Recorder, record: InputRecord) -> None:
    """An input that is written with gradients keeps its number of elements."""
    if recorder.values[id(record.stand_in)].spec.numel != record.spec.numel:
        raise UnsupportedMutationError(
            f"{record.slot} is both resized in place, at {recorder.writes.where(record.stand_in)}, and written with "
            "gradients; write to a copy and return it instead."
        )
