"""Inputs that the function wrote to: what the graph gives them, which sizes they take on, whose versions move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._torch.tensors import base_of, history_of, is_view, leads_to_base, share_counters
from ...graph.effect_log import InplaceView, SetData, Write
from ...graph.slots import Updated
from ..heap.metadata_changes import views_with_history
from ..heap.records import InputRecord, is_moved, is_of_another_kind, is_written_with_history
from ..heap.refusals import changed_with_gradients, written_by_lists
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from .analysis import Analysis
from .storage_swap import is_set_again

__all__ = [
    "add_counted",
    "add_updates",
    "check_histories",
    "check_resized",
    "is_replaced",
    "written_through_bases",
]


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


def check_histories(recorder: Recorder, inputs: Inputs) -> None:
    """Raise for a view that an operator on lists wrote to together with what shares its memory."""
    for record in inputs.records:
        stand_in = record.stand_in
        is_listed_view = id(stand_in) in recorder.writes.listed and is_view(stand_in)
        if is_listed_view and stand_in.requires_grad and not leads_to_base(stand_in):
            raise written_by_lists(str(record.slot), recorder.changes.where(stand_in))


def _is_written(record: InputRecord) -> bool:
    initial, storage = record.initial, record.initial.storage
    in_group = initial.parent is not None
    return (initial.is_written_through or storage.is_written_anywhere) if in_group else storage.is_written


def is_replaced(recorder: Recorder, record: InputRecord) -> bool:
    """Whether an input is another tensor by now."""
    current = recorder.values[id(record.stand_in)]
    moves = recorder.changes.log.of(record.stand_in, SetData)
    return bool(moves) or current.storage is not record.initial.storage


def _is_reshaped(recorder: Recorder, record: InputRecord) -> bool:
    return bool(recorder.changes.log.of(record.stand_in, InplaceView))


def add_counted(recorder: Recorder, analysis: Analysis, records: list[InputRecord]) -> None:
    """Keep one input per shared version counter: moving its version moves that of its aliases."""
    counted = {update.input for update in analysis.updates if update.counted}
    written = {i for i in counted if records[i].spec.numel}
    reshaped = {i for i, record in enumerate(records) if _is_reshaped(recorder, record)}
    unwritten = (reshaped - {*analysis.replaced}) | (counted - written)
    unwritten |= {i for i in analysis.replaced if is_set_again(recorder, records[i])}
    candidates = [i for i in analysis.counted if not _counted_with(written, records, i)]
    analysis.counted = []
    for index in candidates:
        if not _counted_with({*unwritten, *analysis.counted} - {index}, records, index):
            analysis.counted.append(index)
    moving = {*unwritten, *analysis.counted}
    rest = [i for i, r in enumerate(records) if i not in {*written, *moving} and not r.real.is_inference()]
    analysis.counted_along = [i for i in rest if _counted_with(moving, records, i)]


def _counted_with(others: set[int], records: list[InputRecord], index: int) -> bool:
    """Whether moving the version of one of the others moves this one's, too."""
    moved = (records[i].real for i in others)
    return any(share_counters(real, records[index].real) for real in moved if not real.is_inference())


def add_updates(
    recorder: Recorder,
    analysis: Analysis,
    index: int,
    record: InputRecord,
    is_written_through_views: bool,
    views: Sequence[torch.Tensor],
) -> None:
    """`views`: outputs that are views of the input."""
    stand_in, initial = record.stand_in, record.initial
    current = recorder.values[id(stand_in)]
    written = _is_written(record) or is_written_through_views
    counted = is_moved(record)
    differentiable = written and is_written_with_history(record)
    resized = bool(recorder.changes.log.changes_of(stand_in))
    twin = recorder.detached.twin_of(stand_in)
    if twin is not None and not resized and _is_detached_last(recorder, record, twin) and views_with_history(views):
        out = analysis.add(Updated(record.slot), initial.read(recorder.emit), initial.spec, twin)
        analysis.updates.append(Write(index, out, differentiable=True))
        analysis.detached.add(index)
        return
    if is_replaced(recorder, record):
        analysis.replaced.append(index)
        differentiable = False  # what it was before has no history any more
        counted = counted and not is_set_again(recorder, record)
    if not written or (counted and not differentiable and initial.storage.generation == 0):
        if counted and (index in analysis.replaced or not resized):
            analysis.counted.append(index)
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
    out = analysis.add(
        Updated(record.slot), value.read(recorder.emit), value.spec, stand_in if differentiable else None
    )
    counted = counted or stand_in.is_inference()
    analysis.updates.append(Write(index, out, differentiable, counted))
    analysis.first |= {index} if first else set()


def _is_detached_last(recorder: Recorder, record: InputRecord, twin: torch.Tensor) -> bool:
    """Whether the input was written with gradients, then detached, and nothing else happened to its memory since."""
    history: Any = history_of(twin)
    storage = record.initial.storage
    detached = {event.at for event in recorder.changes.log.detached(record.stand_in)}
    is_last = all(at in detached for at in storage.changes if at > storage.written_at)
    return is_last and history.next_functions[0][0]._sequence_nr() != record.start_sequence_nr


def check_resized(recorder: Recorder, record: InputRecord) -> None:
    """An input that is written with gradients keeps its number of elements."""
    if recorder.values[id(record.stand_in)].spec.numel != record.spec.numel:
        raise changed_with_gradients(str(record.slot), recorder.changes.where(record.stand_in))
