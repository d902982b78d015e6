"""Effects on the inputs of a call: writes, marks, changes of sizes, other memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..._torch.histories import nodes_behind
from ..._torch.tensors import base_of, is_marked, is_view, leads_to_base, share_counters
from ...errors import UnsupportedMutationError
from ...graph.effect_log import BumpVersion, Detach, Handle, InplaceView, MarkRequiresGrad, Recorded, SetData, Write
from ...graph.slots import Updated
from ...identity import ById, IdSet
from ..heap.metadata_changes import is_alike
from ..heap.records import InputRecord, is_moved, is_written_with_history
from ..heap.refusals import (
    changed_with_gradients,
    detached_and_written,
    of_exchanged_memory,
    past_the_edges,
    written_by_lists,
)
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from .handles import Placing
from .results import GraphResults

aten = torch.ops.aten

# -------------------------------------------------------------------- writes
# Inputs that the function wrote to: their values from the graph, their new sizes, and the versions that move.


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


def check_histories(recorder: Recorder, inputs: Inputs, results: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Raise for a view, among inputs or results, with a base detached later, or written by lists with an alias."""
    changes = recorder.changes
    detached = ById((event.tensor, event.at) for event in changes.log.events if event.is_detach and event.is_toggle)
    for record in inputs.records:
        stand_in, base = record.stand_in, inputs.by_real.get(base_of(record.real))
        is_listed_view = stand_in in recorder.writes.listed and is_view(stand_in)
        if is_listed_view and stand_in.requires_grad and not leads_to_base(stand_in):
            raise written_by_lists(str(record.slot), changes.where(stand_in))
        if base is not None and base.stand_in in detached:
            raise changed_with_gradients(str(record.slot), changes.where(base.stand_in))
    for view, path in results if detached else ():
        of = base_of(view) if is_view(view) and view.requires_grad else None
        if of is not None and of in detached and recorder.value_of(view).born < detached[of]:
            raise detached_and_written(f"the output {path}", changes.where(of))


def _is_written(record: InputRecord) -> bool:
    initial, storage = record.initial, record.initial.storage
    return initial.is_written_through if initial.parent is not None else storage.is_written


def replaced(recorder: Recorder, records: Sequence[InputRecord]) -> list[int]:
    """The inputs that are given other memory."""
    return [index for index, record in enumerate(records) if recorder.changes.log.of(record.stand_in, SetData)]


def add_effects(placing: Placing) -> None:
    """Log all effects on the inputs themselves but other memory."""
    recorder, records = placing.recorder, placing.inputs.records
    through_bases = written_through_bases(placing.inputs)
    whole, counted = set(through_bases.values()), []
    for index, record in enumerate(records):
        if record not in through_bases and _add_write(placing, index, record, record in whole):
            counted.append(index)
    for index, record in enumerate(records):
        _add_changes(placing, index, record)
    detachments = {event.at for event in recorder.changes.log.events if event.is_detach}
    for index in _once_per_counter(placing, counted):
        record = records[index]
        storages = record.initial.storage, recorder.values[record.stand_in].storage
        moves = [change.at for storage in storages for change in storage.changes_of(record.stand_in)]
        placing.log.append(Recorded(max({*moves} - detachments, default=0), BumpVersion(index)))


def _add_write(placing: Placing, index: int, record: InputRecord, is_written_through_views: bool) -> bool:
    """Log the write of an input. Returns whether the version moves without a write."""
    recorder, stand_in, initial = placing.recorder, record.stand_in, record.initial
    changes = recorder.changes.log.of(stand_in, InplaceView, SetData)
    kinds = {type(event.effect) for event in changes}
    if len(kinds) > 1:
        raise of_exchanged_memory(str(record.slot), recorder.changes.where(stand_in))
    writes = [change.at for change in initial.storage.changes_of(stand_in) if change.is_write]
    # Sizes that change in place count by themselves, where no write does.
    counted = is_moved(record) and (bool(writes) or InplaceView not in kinds)
    written = _is_written(record) or is_written_through_views
    # The tensor from before its memory was replaced has no history any more.
    differentiable = written and is_written_with_history(record) and SetData not in kinds
    if not written or (counted and not differentiable and initial.storage.generation == 0):
        return counted and InplaceView not in kinds
    if differentiable and record.spec.overlaps_itself:
        raise past_the_edges(recorder.changes.where(stand_in))
    value = recorder.values[stand_in] if differentiable else initial
    out = placing.graph.add(
        Updated(record.slot), value.read(recorder.emit), value.spec, stand_in if differentiable else None
    )
    # Before the sizes or the memory change. Nobody can tell when elements are written that no version counts.
    at = min([max(writes, default=initial.storage.written_at), *(event.at for event in changes[:1])])
    placing.log.append(Recorded(at, Write(index, out, differentiable, counted or stand_in.is_inference())))
    return False


def _add_changes(placing: Placing, index: int, record: InputRecord) -> None:
    """Log the marks of an input and its changes of sizes."""
    recorder, stand_in = placing.recorder, record.stand_in
    is_leaf = is_marked(stand_in)
    if is_leaf and not record.real.is_leaf and record.real.requires_grad and not is_view(record.real):
        raise _refused(recorder, record)
    for event in recorder.changes.log.of(stand_in, MarkRequiresGrad, Detach):
        if event.is_toggle:
            placing.log.append(Recorded(event.at, dataclasses.replace(event.effect, input=index)))
    # A leaf that requires grad did not do so then, in eager.
    is_leaf = record.real.is_leaf if record.real.requires_grad else is_leaf
    for event in recorder.changes.log.of(stand_in, InplaceView):
        assert isinstance(event.effect, InplaceView)
        grad_enabled = event.effect.grad_enabled and not is_leaf
        placing.log.append(
            Recorded(event.at, dataclasses.replace(event.effect, input=index, grad_enabled=grad_enabled))
        )


def _once_per_counter(placing: Placing, counted: list[int]) -> list[int]:
    """One input per shared version counter: moving its version moves that of its aliases."""
    records = placing.inputs.records
    written, unwritten = _moving(placing.recorder, records, placing.log)
    kept: list[int] = []
    for index in counted:
        others = {*written, *((unwritten | {*kept}) - {index})}
        if not _counted_with(others, records, index):
            kept.append(index)
    return kept


def counted_along(recorder: Recorder, records: list[InputRecord], log: list[Recorded]) -> tuple[int, ...]:
    """Inputs without a written element that share the version counter of a written input."""
    written, unwritten = _moving(recorder, records, log)
    moving = unwritten | {entry.effect.input for entry in log if isinstance(entry.effect, BumpVersion)}
    rest = [index for index in range(len(records)) if index not in written and index not in moving]
    return tuple(index for index in rest if _counted_with(moving, records, index))


def _moving(recorder: Recorder, records: list[InputRecord], log: list[Recorded]) -> tuple[set[int], set[int]]:
    """Inputs whose version moves: with written elements, and resized or empty."""
    writes = [entry.effect for entry in log if isinstance(entry.effect, Write) and entry.effect.is_whole]
    counted = {write.input for write in writes if write.counted}
    written = {index for index in counted if records[index].spec.numel}
    reshaped = {index for index, r in enumerate(records) if recorder.changes.log.of(r.stand_in, InplaceView)}
    return written, reshaped | (counted - written)


def _counted_with(others: set[int], records: list[InputRecord], index: int) -> bool:
    """Whether moving any further tensor's version moves the tensor's version, too."""
    return any(share_counters(records[i].real, records[index].real) for i in others)


# -------------------------------------------------------------------- other memory
# Inputs that take over a tensor's memory: `set_`, and assignments to `.data`.


def add_swap(placing: Placing, index: int, memory: Handle) -> None:
    """Log the last swap of an input, to `memory`."""
    recorder, records = placing.recorder, placing.inputs.records
    record = records[index]
    real, base = record.real, base_of(record.real) if is_view(record.real) else None
    has_views = base in placing.inputs.by_real or any(base_of(r.real) is real for r in records)
    if is_written_with_history(record) or has_views or (base is not None and real.requires_grad and is_moved(record)):
        raise _refused(recorder, record)
    placing.log.append(Recorded(recorder.changes.log.of(record.stand_in, SetData)[-1].at, SetData(index, memory)))


def views_of_written(memory: list[tuple[InputRecord, list[InputRecord]]], recorder: Recorder) -> IdSet[torch.Tensor]:
    """The views among the inputs that share memory that was written and require grad, or do so then."""
    found: IdSet[torch.Tensor] = IdSet()
    for whole, members in memory:
        gained = any(r.stand_in.requires_grad and not r.real.requires_grad for r in members)
        if whole.initial.storage.changes:
            views = [r for r in _known_as_written(members) if is_view(r.real) and (r.real.requires_grad or gained)]
            found.update(r.real for r in views)
    return found


def _known_as_written(records: list[InputRecord]) -> list[InputRecord]:
    """Tensors with a moved version counter, by a write to the tensor or to a tensor that shares the counter."""
    moved = [record.real for record in records if is_moved(record)]
    return [record for record in records if any(share_counters(record.real, real) for real in moved)]


# -------------------------------------------------------------------- looks of gradients
# Inputs that change sizes or dtype and have gradients. Autograd fixes the shape and dtype of a gradient from the input
# when the node is created, before all changes that the call makes.


def check_sizes(recorder: Recorder, records: list[InputRecord], graph: GraphResults, gradients: Sequence[Any]) -> None:
    """Raise for an input if the sizes, dtype or accumulator of its gradients changed in the call."""
    for index in replaced(recorder, records):
        record, gradient = records[index], gradients[index]
        is_parted = record.real.is_leaf and _is_parted([*graph.carrying_gradients().values()], record.leaf)
        if is_parted or (gradient is not None and not is_alike(gradient.spec, record.spec)):
            raise _refused(recorder, record)


def _refused(recorder: Recorder, record: InputRecord) -> UnsupportedMutationError:
    return changed_with_gradients(str(record.slot), recorder.changes.where(record.stand_in))


def _is_parted(outputs: Sequence[torch.Tensor], leaf: torch.Tensor | None) -> bool:
    """Whether gradients flow to what the leaf was: `set_`, or another dtype, parts it from its accumulator."""
    if leaf is None:
        return False
    ends = [node for node in nodes_behind(outputs) if getattr(node, "variable", None) is leaf]
    return bool(ends) and any(node is not get_gradient_edge(leaf).node for node in ends)
