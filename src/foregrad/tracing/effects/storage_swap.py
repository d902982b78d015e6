"""Inputs that take another tensor's memory over: `set_`, and assignments to `.data`."""

from __future__ import annotations

import torch

from ..._torch.tensors import base_of, is_marked, is_view, share_counters
from ...graph.effect_log import Handle, InplaceView, Recorded, SetData, SetStorage, Write
from ...graph.slots import Updated
from ..heap.records import InputRecord, is_moved, is_written_with_history
from ..heap.refusals import changed_with_gradients, of_exchanged_memory
from ..recorder.recorder import Recorder
from .analysis import Analysis

__all__ = [
    "RESIZES",
    "check_marked",
    "is_set_again",
    "swapped",
    "views_of_written",
]

aten = torch.ops.aten
RESIZES = {aten.resize_.default, aten.resize_as_.default}


def swapped(
    recorder: Recorder, analysis: Analysis, index: int, at: int, records: list[InputRecord], memory: Handle
) -> list[Recorded]:
    """The entries for a swap of an input to `memory`, by its number, and for what is written to that with a history."""
    record = records[index]
    stand_in = record.stand_in
    events = recorder.changes.log.of(stand_in, SetData)
    event, is_last = events[at], at + 1 == len(events)
    is_set = isinstance(event.effect, SetStorage) and not is_marked(stand_in)
    swap: SetData = SetStorage(index, memory) if is_set else SetData(index, memory)
    entries = [Recorded(event.at, swap)]
    if not is_last:
        return entries
    value = recorder.value_of(stand_in)
    is_written = is_written_with_history(record)
    if not is_set:
        is_elsewhere = is_view(record.real) and stand_in.storage_offset() != record.spec.offset
        has_views = any(base_of(r.real) is record.real and r.real.requires_grad for r in records)
        is_view_written = is_view(record.real) and value.storage.written_at > event.at
        is_told_otherwise = is_written and (is_view_written or has_views)
        if is_told_otherwise or (is_elsewhere and record.real.requires_grad and is_moved(record)):
            raise changed_with_gradients(str(record.slot), recorder.changes.where(stand_in))
    if is_written:
        output = analysis.add(Updated(record.slot), value.read(recorder.emit), value.spec, stand_in)
        changes = [e.at for e in recorder.changes.log.of(stand_in, InplaceView) if e.at > event.at]
        written_at = max(value.storage.written_at, *changes, event.at)
        entries.append(Recorded(written_at, Write(index, output, differentiable=True, swapped=True)))
    return entries


def check_marked(recorder: Recorder, analysis: Analysis, records: list[InputRecord]) -> None:
    """Raise for resized views whose base was made to require grad; and for views that were made under no_grad of a
    tensor written with a history and given other memory: PyTorch regenerates their `grad_fn` from the new base.
    """
    resized = {event.tensor for event in recorder.changes.log.events if event.op in RESIZES}
    for at, leaf in analysis.aliases if resized or recorder.changes.replaced else ():
        info = analysis.outputs[at]
        if not isinstance(info, Handle) or info.input is None or not is_view(leaf) or analysis.is_of_swapped(info):
            continue
        record = records[info.input]
        is_of_marked = record.stand_in.requires_grad and not record.real.requires_grad
        _, is_set = recorder.changes.replaced.get(id(record.stand_in), (None, True))
        is_of_swapped = not is_set and is_written_with_history(record)
        is_unasked = is_of_swapped and not all(step.grad_enabled for step in info.steps)
        if (is_of_marked and id(leaf) in resized) or is_unasked:
            concerned = leaf if is_of_marked else record.stand_in
            raise of_exchanged_memory(f"the output {info.path}", recorder.changes.where(concerned))


def views_of_written(memory: list[tuple[InputRecord, list[InputRecord]]], recorder: Recorder) -> set[int]:
    """The views among the inputs, by id, that share memory that was written and require grad, or do so then."""
    found: set[int] = set()
    for whole, members in memory:
        gained = any(r.stand_in.requires_grad and not r.real.requires_grad for r in members)
        storage = whole.initial.storage
        detached = [e for e in recorder.changes.log.events if e.is_detach and e.value.storage is storage]
        if len(storage.changes) > len(detached):  # views of what is only detached stay what they are
            everyone = any(r.detached_at is not None and is_moved(r) for r in members)
            known = members if everyone else _known_as_written(members)
            views = [r for r in known if is_view(r.real) and (r.real.requires_grad or gained)]
            found |= {id(r.real) for r in views}
    return found


def is_set_again(recorder: Recorder, record: InputRecord) -> bool:
    """Whether `set_` replaced the input, and may do so again: an input that is a leaf by then loses its gradient."""
    _, is_set = recorder.changes.replaced.get(id(record.stand_in), (None, False))
    stand_in = record.stand_in
    return is_set and not is_marked(stand_in)


def _known_as_written(records: list[InputRecord]) -> list[InputRecord]:
    """Tensors whose version counter was moved, by a write to them or to another one that shares it."""
    usual = [record for record in records if not record.real.is_inference()]
    moved = [record.real for record in usual if is_moved(record)]
    return [record for record in usual if any(share_counters(record.real, real) for real in moved)]
