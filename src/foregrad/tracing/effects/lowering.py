"""The effect log of a call, from what happened while it was captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..._torch.tensors import history_of, is_marked, is_view
from ...graph.effect_log import (
    BumpVersion,
    Effect,
    Handle,
    InplaceView,
    MarkRequiresGrad,
    QueryGradFn,
    Recorded,
    SetData,
    TakeView,
    Write,
    ordered,
)
from ..heap.metadata_changes import Event, views_with_history
from ..heap.records import InputRecord
from ..heap.refusals import changed_with_gradients
from ..recorder.recorder import Recorder
from .analysis import Analysis
from .handles import toggles

__all__ = ["log_of", "log_of_results"]


def log_of(
    recorder: Recorder, analysis: Analysis, records: Sequence[InputRecord], whole: Sequence[InputRecord]
) -> tuple[Effect, ...]:
    """`records`: the inputs; `whole`: those behind them, which are the memory that others share."""
    views, histories = analysis.early, analysis.histories
    times: dict[int, list[int]] = {}  # when views are taken of a memory
    for entry in (*views, *histories):
        times.setdefault(_memory(records[entry.effect.input]), []).append(entry.at)
    changes: list[Recorded] = []
    for index, record in enumerate(records):
        changes += _changes(recorder, index, record, analysis, times.get(_memory(record), []))
    queries: list[Recorded] = []
    for number, leaf in analysis.aliases:  # their history is that of the input, which is about to lose it
        info = analysis.outputs[number]
        if isinstance(info, Handle) and info.input in analysis.detached and views_with_history([leaf]):
            record = records[info.input]
            detached = recorder.changes.log.detached(record.stand_in)
            at = next(event.at for event in detached if event.at > record.initial.storage.written_at)
            queries.append(Recorded(at, QueryGradFn(info.input, steps=info.steps)))
    everything = *records, *whole
    before: list[Recorded] = []
    after: list[Recorded] = []
    for write in analysis.updates:
        at, is_after = _written_at(recorder, write, everything[write.input], analysis)
        (after if is_after else before).append(Recorded(at, write))
    counted = []
    for index in analysis.counted:
        record = records[index]
        moved = max(record.initial.storage.changed_at, recorder.values[id(record.stand_in)].storage.changed_at)
        counted.append(Recorded(moved, BumpVersion(index)))
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
    views = {e.effect.input: e.at for e in recorded if isinstance(e.effect, TakeView) and e.effect.of_plain}
    last = {e.effect.input: e.at for e in recorded if isinstance(e.effect, (Write, BumpVersion))}
    found = []
    for index, taken_at in views.items():
        storage = records[index].initial.storage
        if index in last and last[index] < taken_at < storage.written_at:
            found.append(Recorded(storage.written_at, BumpVersion(index)))
    return found


def _memory(record: InputRecord) -> int:
    return id(record.initial.storage)


def _changes(
    recorder: Recorder, index: int, record: InputRecord, analysis: Analysis, views: list[int]
) -> list[Recorded]:
    """What happens to an input itself, but for writes. `views`: when views are taken of its memory."""
    log, stand_in = recorder.changes.log, record.stand_in
    _check_epochs(recorder, record)
    toggled = _toggles(recorder, record, views)
    recorded = [Recorded(event.at, dataclasses.replace(event.effect, input=index)) for event in toggled]
    # A leaf that requires grad did not do so then, in eager.
    is_leaf = record.real.is_leaf if record.real.requires_grad else is_marked(stand_in)
    written = set() if analysis.swaps else analysis.written_dtypes()
    swaps = log.of(stand_in, SetData)
    kept = {entry.at for entry in analysis.swaps}
    for event in log.of(stand_in, InplaceView):
        since = [swap.at for swap in swaps if swap.at < event.at]
        if since and since[-1] not in kept:
            continue
        assert isinstance(event.effect, InplaceView)
        grad_enabled = event.effect.grad_enabled and not is_leaf
        change = dataclasses.replace(event.effect, input=index, grad_enabled=grad_enabled)
        if written and record.spec.dtype not in written:
            # A view of another dtype takes up the history of its base, when asked, as it was taken.
            recorded.append(Recorded(event.at, QueryGradFn(index)))
        recorded.append(Recorded(event.at, change))
    return recorded


def _written_at(recorder: Recorder, write: Write, record: InputRecord, analysis: Analysis) -> tuple[int, bool]:
    """When the last write is made, and whether after what else happens then.

    It is of elements before the sizes change, of a history after that.
    """
    at = record.initial.storage.written_at
    changes = [event.at for event in recorder.changes.log.of(record.stand_in, InplaceView)]
    swaps = recorder.changes.log.of(record.stand_in, SetData)
    if swaps:  # what was its memory is written through it, as long as it has that
        return min(at, swaps[0].at, *changes[:1]), False
    if changes and write.differentiable and write.input not in analysis.first:
        return max(at, changes[-1]), True
    return min([at, *changes[:1]]), write.differentiable and not changes


def _toggles(recorder: Recorder, record: InputRecord, views: list[int]) -> list[Event]:
    """The `requires_grad_()` and `detach_()` events of an input, without pairs between which no view is taken."""
    stand_in = record.stand_in
    had_history = not (record.real.requires_grad and record.real.is_leaf)
    kept: list[Event] = []
    for event in toggles(recorder, record):
        is_mark = isinstance(event.effect, MarkRequiresGrad)
        if kept and not any(kept[-1].at < at < event.at for at in views):
            if isinstance(kept[-1].effect, MarkRequiresGrad) is is_mark:
                kept.pop()
            elif not (is_mark and had_history):
                kept.pop()
                continue
        kept.append(event)
    if stand_in.requires_grad and history_of(stand_in) is not None:
        while kept and not any(kept[-1].at < at for at in views):
            kept.pop()  # what is written takes the place of its history
    return kept


def _check_epochs(recorder: Recorder, record: InputRecord) -> None:
    stand_in = record.stand_in
    is_leaf = not record.real.is_leaf and record.real.requires_grad and is_marked(stand_in)
    if is_leaf and not is_view(record.real):
        raise changed_with_gradients(str(record.slot), recorder.changes.where(stand_in))
