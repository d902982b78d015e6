"""The effect log of a call, from what happened while it was captured."""

from __future__ import annotations

from collections.abc import Sequence

from ..._torch.tensors import history_of, is_marked, is_view
from ...graph.effect_log import (
    BumpVersion,
    Detach,
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
from ..heap.event_log import Event, Happened
from ..heap.inplace_detach import views_with_history
from ..heap.records import InputRecord
from ..heap.refusals import changed_with_gradients
from ..recorder.recorder import Recorder
from .analysis import Analysis
from .handles import toggles

__all__ = ["log_of", "log_of_results"]

_BETWEEN = 0.5  # right before or after what happened at some time


def log_of(
    recorder: Recorder, analysis: Analysis, records: Sequence[InputRecord], whole: Sequence[InputRecord]
) -> tuple[Effect, ...]:
    """`records`: the inputs; `whole`: those behind them, which are the memory that others share."""
    views, histories = _views(analysis, records)
    views += _marked_views(recorder, analysis)
    times: dict[int, list[float]] = {}  # when views are taken of a memory
    for entry in (*views, *histories):
        times.setdefault(_memory(records[entry.effect.input]), []).append(entry.at)
    changes: list[Recorded] = []
    for index, record in enumerate(records):
        changes += _changes(recorder, index, record, analysis, times.get(_memory(record), []))
    for number, leaf in analysis.aliases:  # their history is that of the input, which is about to lose it
        info = analysis.outputs[number]
        if isinstance(info, Handle) and info.input in analysis.detached and views_with_history([leaf]):
            record = records[info.input]
            detached = recorder.changes.log.of(record.stand_in, Happened.DETACHED)
            before = next(event.at for event in detached if event.at > record.initial.storage.written_at)
            changes.append(Recorded(before - _BETWEEN, QueryGradFn(info.input, steps=info.steps)))
    everything = *records, *whole
    plain: list[Recorded] = []
    differentiable: list[Recorded] = []
    for write in analysis.updates:
        at = _written_at(recorder, write, everything[write.input], analysis)
        (differentiable if write.differentiable else plain).append(Recorded(at, write))
    counted = []
    for index in analysis.counted:
        record = records[index]
        moved = max(record.initial.storage.changed_at, recorder.values[id(record.stand_in)].storage.changed_at)
        counted.append(Recorded(moved, BumpVersion(index)))
    counted += _bumps_after_views([*views, *histories, *plain, *differentiable, *counted], records)
    # What happens at one time happens in this order.
    return ordered([*views, *plain, *changes, *histories, *differentiable, *counted, *analysis.swaps])


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


def _views(analysis: Analysis, records: Sequence[InputRecord]) -> tuple[list[Recorded], list[Recorded]]:
    """The views that are taken before something changes, in the order of the outputs, and what is written to some."""
    views, histories = [], []
    swapped = [swap.effect.source for swap in analysis.swaps if isinstance(swap.effect, SetData)]
    for position, info in enumerate([*analysis.outputs, *analysis.sources, *swapped]):
        if not isinstance(info, Handle) or info.input is None:
            continue
        upto, output = analysis.histories.get(position, (len(info.steps), None))
        for count, step in enumerate(info.steps[:upto], start=1):
            early = analysis.early.get((info.input, step.call))
            if early is None:
                break
            view = TakeView(info.input, info.path, early.of_plain, early.first, steps=info.steps[:count])
            views.append(Recorded(early.at, view))
        if output is not None:
            write = Write(info.input, output, True, steps=info.steps[:upto])
            histories.append(Recorded(records[info.input].initial.storage.written_at, write))
    return views, histories


def _marked_views(recorder: Recorder, analysis: Analysis) -> list[Recorded]:
    """`requires_grad_()` on views that are returned, or of which views are."""
    recorded = []
    aliases = [info for info in analysis.outputs if isinstance(info, Handle)]
    for event in recorder.changes.log.events:
        view = event.value.view
        if event.what is not Happened.MARKED or view is None:
            continue
        for info in aliases:
            at = [step.call == id(view.call) and step.index == view.index for step in info.steps]
            if info.input is not None and any(at):
                steps = info.steps[: at.index(True) + 1]
                recorded.append(Recorded(event.value.born, TakeView(info.input, info.path, steps=steps)))
                recorded.append(Recorded(event.at, MarkRequiresGrad(info.input, steps=steps)))
                break
    return recorded


def _changes(
    recorder: Recorder, index: int, record: InputRecord, analysis: Analysis, views: list[float]
) -> list[Recorded]:
    """What happens to an input itself, but for writes. `views`: when views are taken of its memory."""
    log, stand_in = recorder.changes.log, record.stand_in
    _check_epochs(recorder, record)
    recorded = [Recorded(event.at, _toggle(index, event)) for event in _toggles(recorder, record, views)]
    # A leaf that requires grad did not do so then, in eager.
    is_leaf = record.real.is_leaf if record.real.requires_grad else is_marked(stand_in)
    written = set() if analysis.swaps else analysis.written_dtypes()
    swaps = log.swaps_of(stand_in)
    kept = {entry.at for entry in analysis.swaps}
    for event in log.of(stand_in, Happened.RESHAPED):
        since = [swap.at for swap in swaps if swap.at < event.at]
        if since and since[-1] not in kept:
            continue
        grad_enabled = event.grad_enabled and not is_leaf
        change = InplaceView(index, event.op, event.args, tuple(event.kwargs.items()), grad_enabled)
        if written and record.spec.dtype not in written:
            # A view of another dtype takes up the history of its base, when asked, as it was taken.
            recorded.append(Recorded(event.at - _BETWEEN, QueryGradFn(index)))
        recorded.append(Recorded(event.at, change))
    return recorded


def _written_at(recorder: Recorder, write: Write, record: InputRecord, analysis: Analysis) -> float:
    """When the last write is made: of elements before the sizes change, with a history after it."""
    at = record.initial.storage.written_at
    changes = [event.at for event in recorder.changes.log.of(record.stand_in, Happened.RESHAPED)]
    swaps = recorder.changes.log.swaps_of(record.stand_in)
    if swaps:  # what was its memory is written through it, as long as it has that
        changes = [change for change in changes if change < swaps[0].at]
        return min(at, swaps[0].at - _BETWEEN, *(change - _BETWEEN for change in changes[:1]))
    if not changes:
        return at
    if write.differentiable and write.input not in analysis.first:
        return max(at, changes[-1] + _BETWEEN)
    return min(at, changes[0] - _BETWEEN)


def _toggle(index: int, event: Event) -> Effect:
    if event.what is Happened.MARKED:
        return MarkRequiresGrad(index)
    return Detach(index, in_place=event.what is Happened.DETACHED)


def _toggles(recorder: Recorder, record: InputRecord, views: list[float]) -> list[Event]:
    """The input is marked and detached, but for what nobody can see: nothing is taken of it in between."""
    stand_in = record.stand_in
    had_history = not (record.real.requires_grad and record.real.is_leaf)
    kept: list[Event] = []
    for event in toggles(recorder, record):
        is_mark = event.what is Happened.MARKED
        if kept and not any(kept[-1].at < at < event.at for at in views):
            if (kept[-1].what is Happened.MARKED) is is_mark:
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
