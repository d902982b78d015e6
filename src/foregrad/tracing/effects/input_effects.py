"""What happens to the inputs of a call: which are written, which take other memory over, and the log of it all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..._torch.histories import nodes_behind
from ..._torch.tensors import base_of, history_of, is_marked, is_view, leads_to_base, share_counters
from ...errors import UnsupportedMutationError
from ...graph.effect_log import (
    BumpVersion,
    Detach,
    Effect,
    Handle,
    InplaceView,
    QueryGradFn,
    Recorded,
    SetData,
    TakeView,
    Write,
    ordered,
)
from ...graph.slots import Updated
from ...identity import IdSet
from ..heap.metadata_changes import is_alike, toggles, views_with_history
from ..heap.records import InputRecord, is_moved, is_written_with_history
from ..heap.refusals import changed_with_gradients, written_by_lists
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from .analysis import Analysis

aten = torch.ops.aten

# -------------------------------------------------------------------- writes
# Inputs that the function wrote to: what the graph gives them, which sizes they take on, whose versions move.


def written_through_bases(inputs: Inputs) -> dict[InputRecord, InputRecord]:
    """{record: the record of the tensor it is a view of}, where writing to that gives the view its new history too."""
    through: dict[InputRecord, InputRecord] = {}
    for record in inputs.records:
        stand_in = record.stand_in
        base = inputs.by_stand_in.get(base_of(stand_in)) if is_view(stand_in) else None
        if (
            base is not None
            and _is_written(record)
            and is_written_with_history(record)
            and is_written_with_history(base)
        ):
            through[record] = base
    return through


def check_histories(recorder: Recorder, inputs: Inputs) -> None:
    """Raise for a view that an operator on lists wrote to together with what shares its memory."""
    for record in inputs.records:
        stand_in = record.stand_in
        is_listed_view = stand_in in recorder.writes.listed and is_view(stand_in)
        if is_listed_view and stand_in.requires_grad and not leads_to_base(stand_in):
            raise written_by_lists(str(record.slot), recorder.changes.where(stand_in))


def _is_written(record: InputRecord) -> bool:
    initial, storage = record.initial, record.initial.storage
    return initial.is_written_through if initial.parent is not None else storage.is_written


def is_replaced(recorder: Recorder, record: InputRecord) -> bool:
    """Whether an input is another tensor by now."""
    current = recorder.values[record.stand_in]
    moves = recorder.changes.log.of(record.stand_in, SetData)
    return bool(moves) or current.storage is not record.initial.storage


def _is_reshaped(recorder: Recorder, record: InputRecord) -> bool:
    """Whether a call changes its sizes in place: nobody sees those that it has between two swaps of its memory."""
    log = recorder.changes.log
    swaps = [event.at for event in log.of(record.stand_in, SetData)]
    changes = [event.at for event in log.of(record.stand_in, InplaceView)]
    return any(not swaps or not swaps[0] < at < swaps[-1] for at in changes)


def add_counted(analysis: Analysis) -> None:
    """Keep one input per shared version counter: moving its version moves that of its aliases."""
    recorder, records = analysis.recorder, analysis.inputs.records
    counted = {update.input for update in analysis.updates if update.counted}
    written = {i for i in counted if records[i].spec.numel}
    reshaped = {i for i, record in enumerate(records) if _is_reshaped(recorder, record)}
    unwritten = (reshaped - {*analysis.replaced}) | (counted - written)
    candidates = [i for i in analysis.counted if not _counted_with(written, records, i)]
    analysis.counted = []
    for index in candidates:
        if not _counted_with({*unwritten, *analysis.counted} - {index}, records, index):
            analysis.counted.append(index)
    moving = {*unwritten, *analysis.counted}
    rest = [i for i in range(len(records)) if i not in {*written, *moving}]
    analysis.counted_along = [i for i in rest if _counted_with(moving, records, i)]


def _counted_with(others: set[int], records: list[InputRecord], index: int) -> bool:
    """Whether moving the version of one of the others moves this one's, too."""
    return any(share_counters(records[i].real, records[index].real) for i in others)


def add_updates(
    analysis: Analysis, index: int, record: InputRecord, is_written_through_views: bool, views: Sequence[torch.Tensor]
) -> None:
    """`views`: outputs that are views of the input."""
    recorder, stand_in, initial = analysis.recorder, record.stand_in, record.initial
    current = recorder.values[stand_in]
    written = _is_written(record) or is_written_through_views
    # Sizes that change in place count by themselves, where no write does.
    counted = is_moved(record) and (bool(_counted_writes(record)) or not _is_reshaped(recorder, record))
    differentiable = written and is_written_with_history(record)
    resized = bool(recorder.changes.log.of(stand_in, InplaceView, SetData))
    twin = recorder.detached.twin_of(stand_in)
    if twin is not None and not resized and _is_detached_last(recorder, record, twin) and views_with_history(views):
        out = analysis.add(Updated(record.slot), initial.read(recorder.emit), initial.spec, twin)
        analysis.updates.append(Write(index, out, differentiable=True))
        analysis.detached.add(index)
        return
    if is_replaced(recorder, record):
        analysis.replaced.append(index)
        differentiable = False  # what it was before has no history any more
    if not written or (counted and not differentiable and initial.storage.generation == 0):
        if counted and (index in analysis.replaced or not resized):
            analysis.counted.append(index)
        return
    value = current if differentiable else initial
    out = analysis.add(
        Updated(record.slot), value.read(recorder.emit), value.spec, stand_in if differentiable else None
    )
    counted = counted or stand_in.is_inference()
    analysis.updates.append(Write(index, out, differentiable, counted))


def _is_detached_last(recorder: Recorder, record: InputRecord, twin: torch.Tensor) -> bool:
    """Whether the input was written with gradients, then detached, and nothing else happened to its memory since."""
    history: Any = history_of(twin)
    storage = record.initial.storage
    detached = {event.at for event in recorder.changes.log.detached(record.stand_in)}
    is_last = all(change.at in detached for change in storage.changes if change.at > storage.written_at)
    return is_last and history.next_functions[0][0]._sequence_nr() != record.start_sequence_nr


# -------------------------------------------------------------------- other memory
# Inputs that take another tensor's memory over: `set_`, and assignments to `.data`.


def swapped(analysis: Analysis, index: int, memory: Handle) -> Recorded:
    """The entry for the last swap of an input, to `memory`."""
    recorder, records = analysis.recorder, analysis.inputs.records
    record = records[index]
    real, base = record.real, base_of(record.real) if is_view(record.real) else None
    has_views = base in analysis.inputs.by_real or any(base_of(r.real) is real for r in records)
    if is_written_with_history(record) or has_views or (base is not None and real.requires_grad and is_moved(record)):
        raise _refused(recorder, record)
    return Recorded(recorder.changes.log.of(record.stand_in, SetData)[-1].at, SetData(index, memory))


def views_of_written(memory: list[tuple[InputRecord, list[InputRecord]]], recorder: Recorder) -> IdSet[torch.Tensor]:
    """The views among the inputs that share memory that was written and require grad, or do so then."""
    found: IdSet[torch.Tensor] = IdSet()
    for whole, members in memory:
        gained = any(r.stand_in.requires_grad and not r.real.requires_grad for r in members)
        storage = whole.initial.storage
        detached = [e for e in recorder.changes.log.events if e.is_detach and e.value.storage is storage]
        if len(storage.changes) > len(detached):  # views of what is only detached stay what they are
            everyone = any(r.detached_at is not None and is_moved(r) for r in members)
            known = members if everyone else _known_as_written(members)
            views = [r for r in known if is_view(r.real) and (r.real.requires_grad or gained)]
            found.update(r.real for r in views)
    return found


def _known_as_written(records: list[InputRecord]) -> list[InputRecord]:
    """Tensors whose version counter was moved, by a write to them or to another one that shares it."""
    moved = [record.real for record in records if is_moved(record)]
    return [record for record in records if any(share_counters(record.real, real) for real in moved)]


# -------------------------------------------------------------------- looks of gradients
# Inputs that change sizes or dtype and have gradients. Autograd fixes the shape and dtype of a gradient from the input
# when the node is created, which is before all that the call does to it.


def check_sizes(analysis: Analysis, gradients: Sequence[Any]) -> None:
    """Raise for an input whose gradients have other sizes, another dtype or another accumulator than it came with."""
    recorder, records = analysis.recorder, analysis.inputs.records
    with_history = [fake for fake in analysis.fakes if fake is not None]
    for index in analysis.replaced:
        record, gradient = records[index], gradients[index]
        stand_in, spec, requires_grad = record.stand_in, record.spec, record.real.requires_grad
        if record.real.is_leaf and _is_parted(with_history, record.leaf):
            raise _refused(recorder, record)
        if gradient is not None and not is_alike(gradient.spec, spec):
            raise _refused(recorder, record)
        # A view that was taken of it before has its gradients flow there by itself.
        is_other = stand_in.shape != spec.shape or stand_in.dtype is not spec.dtype
        outputs = [o for o in analysis.outputs if isinstance(o, Handle) and o.input == index and o.steps]
        is_viewed = not all(map(analysis.is_of_swapped, outputs))
        if is_other and requires_grad and is_viewed:
            raise _refused(recorder, record)


def _refused(recorder: Recorder, record: InputRecord) -> UnsupportedMutationError:
    return changed_with_gradients(str(record.slot), recorder.changes.where(record.stand_in))


def _is_parted(outputs: Sequence[torch.Tensor], leaf: torch.Tensor | None) -> bool:
    """Whether gradients flow to what the leaf was: `set_`, or another dtype, parts it from its accumulator."""
    if leaf is None:
        return False
    ends = [node for node in nodes_behind(outputs) if getattr(node, "variable", None) is leaf]
    return bool(ends) and any(node is not get_gradient_edge(leaf).node for node in ends)


# -------------------------------------------------------------------- the log
# The effect log of a call, from what happened while it was captured.


def log_of(analysis: Analysis) -> tuple[Effect, ...]:
    """What happens to the inputs."""
    recorder, records = analysis.recorder, analysis.inputs.records
    views, histories = analysis.early, analysis.histories
    changes: list[Recorded] = []
    for index, record in enumerate(records):
        changes += _changes(analysis, index, record)
    queries: list[Recorded] = []
    for number, leaf in analysis.aliases:  # their history is that of the input, which is about to lose it
        info = analysis.outputs[number]
        if not isinstance(info, Handle) or info.input is None or not views_with_history([leaf]):
            continue
        record = records[info.input]
        lost = [event for event in recorder.changes.log.of(record.stand_in, Detach) if event.required_grad]
        was_plain = lost and not (record.real.requires_grad or record.stand_in.requires_grad or leaf.is_leaf)
        if was_plain or info.input in analysis.detached:
            queries.append(Recorded(lost[-1].at, QueryGradFn(info.input, steps=info.steps)))
    before: list[Recorded] = []
    after: list[Recorded] = []
    for write in analysis.updates:
        at, is_after = _written_at(analysis, write, records[write.input])
        (after if is_after else before).append(Recorded(at, write))
    counted = []
    detachments = {event.at for event in recorder.changes.log.events if event.is_detach}
    for index in analysis.counted:
        record = records[index]
        storages = record.initial.storage, recorder.values[record.stand_in].storage
        moves = [change.at for storage in storages for change in storage.changes_of(record.stand_in)]
        counted.append(Recorded(max({*moves} - detachments, default=0), BumpVersion(index)))
    counted += _bumps_after_views([*views, *histories, *before, *after, *counted], records)
    # What happens at one time happens in this order.
    return ordered([*views, *before, *queries, *changes, *histories, *after, *counted, *analysis.swaps])


def log_of_results(analysis: Analysis) -> tuple[Effect, ...]:
    """What happens to the results of a call, in program order, with the views that are taken of them in between."""
    if not analysis.of_results:
        return ()
    return ordered([*analysis.views, *analysis.of_results])


def _bumps_after_views(recorded: Sequence[Recorded], records: Sequence[InputRecord]) -> list[Recorded]:
    """Versions that move once more: a view was taken before a write, all of which are made ahead of that view."""
    views: dict[int, list[int]] = {}
    for entry in recorded:
        if isinstance(entry.effect, TakeView):
            views.setdefault(entry.effect.input, []).append(entry.at)
    last = {e.effect.input: e.at for e in recorded if isinstance(e.effect, (Write, BumpVersion))}
    found = []
    for index, taken in views.items():
        counted_at = max(_counted_writes(records[index]), default=0)
        if any(last.get(index, counted_at) < at < counted_at for at in taken):
            found.append(Recorded(counted_at, BumpVersion(index)))
    return found


def _changes(analysis: Analysis, index: int, record: InputRecord) -> list[Recorded]:
    """What happens to an input itself, but for writes."""
    recorder, stand_in = analysis.recorder, record.stand_in
    log = recorder.changes.log
    _check_epochs(recorder, record)
    toggled = toggles(recorder, record)
    recorded = [Recorded(event.at, dataclasses.replace(event.effect, input=index)) for event in toggled]
    # A leaf that requires grad did not do so then, in eager.
    is_leaf = record.real.is_leaf if record.real.requires_grad else is_marked(stand_in)
    swaps = log.of(stand_in, SetData)
    kept = {entry.at for entry in analysis.swaps}
    for event in log.of(stand_in, InplaceView):
        since = [swap.at for swap in swaps if swap.at < event.at]
        if since and since[-1] not in kept:
            continue
        assert isinstance(event.effect, InplaceView)
        grad_enabled = event.effect.grad_enabled and not is_leaf
        change = dataclasses.replace(event.effect, input=index, grad_enabled=grad_enabled)
        recorded.append(Recorded(event.at, change))
    return recorded


def _written_at(analysis: Analysis, write: Write, record: InputRecord) -> tuple[int, bool]:
    """When the last write is made, and whether after what else happens then. It is before the sizes change."""
    # Nobody can tell when elements are written that no version counts.
    counted = _counted_writes(record)
    at = max(counted, default=record.initial.storage.written_at)
    log = analysis.recorder.changes.log
    changes = [event.at for event in log.of(record.stand_in, InplaceView)]
    swaps = log.of(record.stand_in, SetData)
    if swaps:  # what was its memory is written through it, as long as it has that
        return min(at, swaps[0].at, *changes[:1]), False
    return min([at, *changes[:1]]), write.differentiable


def _counted_writes(record: InputRecord) -> list[int]:
    """When its memory was written so that its version moved."""
    return [change.at for change in record.initial.storage.changes_of(record.stand_in) if change.is_write]


def _check_epochs(recorder: Recorder, record: InputRecord) -> None:
    stand_in = record.stand_in
    is_leaf = not record.real.is_leaf and record.real.requires_grad and is_marked(stand_in)
    if is_leaf and not is_view(record.real):
        raise changed_with_gradients(str(record.slot), recorder.changes.where(stand_in))
