"""The way from one tensor to a view of it, and which of its steps must be taken before something else happens."""

from __future__ import annotations

import torch

from ..._torch.tensors import allows_writes, is_view
from ...graph.effect_log import Handle, Recorded, TakeView, ViewStep
from ..heap.alias import Value
from ..heap.event_log import Event, Happened
from ..heap.records import InputRecord, is_moved
from ..heap.refusals import of_exchanged_memory
from ..heap.view_chain import chain_of
from ..heap.view_replay import View
from ..recorder.recorder import Recorder
from .analysis import Early

__all__ = ["early_steps", "marked_at", "steps_between", "taken", "toggles"]


def steps_between(value: Value, base: Value) -> tuple[ViewStep, ...]:
    """The way from `base` to `value`."""
    return tuple(_step(value) for value in _values_between(value, base))


def taken(handle: Handle, value: Value) -> list[Recorded]:
    """The views on the way to `handle`, each as of when the function took it. `value`: what `handle` names."""
    steps, found = handle.steps, []
    for link in chain_of(value):
        if not steps or link.view is None or steps[-1].call != id(link.view.call):
            break
        input = -1 if handle.input is None else handle.input
        view = TakeView(input, handle.path, result=handle.output, steps=steps)
        found.append(Recorded(link.born, view))
        steps = steps[:-1]
    return found


def marked_at(recorder: Recorder, tensor: torch.Tensor, value: Value) -> int:
    """When `requires_grad_()` was last called on it; when it was made, where its maker said so."""
    return max((event.at for event in recorder.changes.log.of(tensor, Happened.MARKED)), default=value.born)


def _values_between(value: Value, base: Value) -> list[Value]:
    values = []
    while value is not base:
        if value.parent is None:
            raise of_exchanged_memory("an output")
        values.append(value)
        value = value.parent
    return values[::-1]


def _step(value: Value) -> ViewStep:
    view = value.view
    assert isinstance(view, View)
    return ViewStep(view.op, view.args, tuple(view.kwargs.items()), view.index, id(view.call), view.grad_enabled)


def early_steps(value: Value, base: Value, record: InputRecord, recorder: Recorder, until: int = 0) -> dict[int, Early]:
    """By `call`: those of the steps from the tensor of an input to `value` that what happens later must not precede.

    `until`: when it was given other memory.
    """
    is_marked = record.stand_in.requires_grad and not record.real.requires_grad
    is_marked = is_marked or record.is_marked
    marked = [event for event in recorder.changes.log.events if _is_mark_of_view(event, value)]
    toggled_at = max(until, *(event.at for event in (*toggles(recorder, record), *marked)), 0)
    at_start = base is record.initial
    detached_at = record.detached_at
    # Of one of several views made at once none may be taken once a version moves, be it of other memory by now.
    is_one_of_several = is_view(record.real) and not allows_writes(record.real)
    counts_elsewhere = is_one_of_several and is_moved(record) and not value.storage.changes
    found: dict[int, Early] = {}
    above: ViewStep | None = None
    for taken in _values_between(value, base):
        step, changes = _step(taken), taken.storage.changes
        before, early = found.get(above.call) if above is not None else None, None
        if is_marked and not taken.of_differentiable:
            was_changed = bool(changes) and changes[0] < taken.born
            early = Early(taken.born, True, not was_changed or (at_start and taken.born < changes[-1]))
        elif taken.born < max(taken.storage.changed_at, toggled_at):
            early = Early(taken.born)
        elif counts_elsewhere:
            early = Early(0)
        # Of a view that was taken under no_grad none may be taken, but under no_grad, once its base is written.
        if before is not None and above is not None and step.grad_enabled and not above.grad_enabled:
            early = before if detached_at is None and not (is_marked or marked) else early
        if early is None:
            break
        found[step.call] = early
        above = step
    return found


def _is_mark_of_view(event: Event, value: Value) -> bool:
    """Whether a view in the memory of `value` was made to require grad."""
    view = event.value.view
    if event.what is not Happened.MARKED or view is None or view.is_member:
        return False
    return event.value.storage is value.storage


def toggles(recorder: Recorder, record: InputRecord) -> list[Event]:
    """When the function made the input a leaf that requires grad, or one that does not."""
    events = recorder.changes.log.of(record.stand_in, Happened.MARKED, Happened.UNMARKED, Happened.DETACHED)
    return [
        e
        for e in events
        if e.args[0] is not (e.what is Happened.MARKED) or (record.is_marked and e.what is Happened.MARKED)
    ]
