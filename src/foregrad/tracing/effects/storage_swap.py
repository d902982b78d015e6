"""Inputs that take another tensor's memory over: `set_`, and assignments to `.data`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..._torch.tensors import allows_writes, base_of, history_of, is_marked, is_view, leads_to_base, share_counters
from ...errors import UnsupportedAliasError, UnsupportedMutationError
from ...graph.effect_log import Memory, Recorded, SetData, SetStorage, Write
from ...graph.meta import TensorSpec
from ...graph.signature import AliasOutput
from ...graph.slots import Updated
from ..heap.event_log import Happened
from ..heap.records import InputRecord, is_moved, is_no_grad_view
from ..recorder.recorder import Recorder
from ..tape.gradient_paths import has_undefined_gradient
from ..tape.origin import Origin, user_line

if TYPE_CHECKING:
    from .analysis import Analysis

__all__ = [
    "RESIZES",
    "SET_ELSEWHERE",
    "check_marked",
    "check_overlapping",
    "is_set_again",
    "is_written_with_history",
    "swapped",
    "views_of_written",
]

aten = torch.ops.aten
SET_ELSEWHERE = (
    "{}, a view, is given memory where it begins at another place by `set_` at {}, and gradients flow to it: PyTorch "
    "takes it for another view then. Use a copy instead."
)
RESIZES = {aten.resize_.default, aten.resize_as_.default}


def swapped(
    recorder: Recorder, analysis: Analysis, index: int, at: int, records: list[InputRecord], memory: Memory
) -> list[Recorded]:
    """The entries for a swap of an input to `memory`, by its number, and for what is written to that with a history."""
    record = records[index]
    stand_in = record.stand_in
    events = recorder.changes.log.swaps_of(stand_in)
    event, is_last = events[at], at + 1 == len(events)
    is_set = event.what is Happened.SET and not is_marked(stand_in)
    barred = is_set and has_undefined_gradient(history_of(stand_in))
    if not is_last:
        view = None if event.after is None else event.after.view
        barred = is_set and view is not None and bool(view.args[0])
    swap: SetData = SetStorage(index, memory, barred) if is_set else SetData(index, memory)
    entries = [Recorded(event.at, None, swap)]
    if not is_last:
        return entries
    value = recorder.value_of(stand_in)
    source = None if memory.input is None else records[memory.input]
    if source is not None and source.detached_at is not None and stand_in.requires_grad:
        raise UnsupportedMutationError(
            f"{record.slot} takes over the memory of {source.slot} at {recorder.changes.where(stand_in)}, which "
            f"`detach_` is called on, last at {recorder.changes.where(source.stand_in)}: its history would be lost. "
            "Detach before, or out of place."
        )
    is_of_it = source is not None and (source is record or base_of(source.real) is record.real)
    is_marked_view = is_of_it or (source is not None and not source.stand_in.requires_grad)
    if barred and not record.real.requires_grad and is_marked_view:
        raise UnsupportedMutationError(
            f"`set_` at {recorder.changes.where(stand_in)} gives {record.slot} the memory of a view that the function "
            "made require grad: detach it before, or use torch.no_grad()."
        )
    base = None if source is None else base_of(source.real)
    ends = source is not None and base is not None and base.requires_grad and not leads_to_base(source.real)
    if (
        is_set
        and source is not None
        and ends
        and (value.storage.is_written or recorder.changes.log.of(source.stand_in, Happened.MARKED))
    ):
        raise UnsupportedMutationError(
            f"`set_` at {recorder.changes.where(stand_in)} gives {record.slot} the memory of a view made under "
            "no_grad, or of a view of that, and it is written to, or `requires_grad_` called on it: detach that view."
        )
    if is_written_with_history(record) and not barred:
        takes_view = source is not None and base_of(source.real) is record.real and is_no_grad_view(source)
        has_views = not is_set and any(base_of(r.real) is record.real and r.real.requires_grad for r in records)
        if is_view(stand_in) or is_view(record.real) or takes_view or has_views:
            raise UnsupportedMutationError(
                f"{record.slot} takes over another tensor's memory at {recorder.changes.where(stand_in)} and is "
                "written with gradients flowing through; write to a copy and return it instead."
            )
        output = analysis.add(Updated(record.slot), value.read(recorder.emit), value.spec, stand_in)
        changes = [e.at for e in recorder.changes.log.of(stand_in, Happened.RESHAPED) if e.at > event.at]
        written_at = max(value.storage.written_at, *changes, event.at) + 0.5
        entries.append(Recorded(written_at, None, Write(index, output, differentiable=True, swapped=True)))
    is_elsewhere = not is_set and is_view(record.real) and stand_in.storage_offset() != record.spec.offset
    if is_elsewhere and record.real.requires_grad and is_moved(record):
        raise UnsupportedMutationError(
            f"{record.slot}, a view, is given other memory (`.data = ...`) at {recorder.changes.where(stand_in)}, and "
            "what it is a view of is written to: its gradient would be another. Write to a copy instead."
        )
    return entries


def check_overlapping(recorder: Recorder, records: list[InputRecord]) -> None:
    """Of a leaf that has several elements in one place, eager's views give other gradients once it is written."""
    written = {
        id(r.stand_in): r
        for r in records
        if r.spec.overlaps_itself and r.real.requires_grad and r.real.is_leaf and is_moved(r)
    }
    for value in list(recorder.values.values()) if written else ():
        fake = value.fake
        if fake is None or value.born >= value.storage.changed_at or not (is_view(fake) and fake.requires_grad):
            continue
        record = written.get(id(base_of(fake)))
        if record is not None and fake.numel() and not is_marked(fake):
            raise UnsupportedAliasError(
                f"{record.slot} has several elements in one place (`expand`) and is written to after a view of it was "
                f"taken at {user_line(value.taken_at)}: the view's gradient is another then. Take the view after the "
                "write, or pass a copy."
            )


def check_marked(recorder: Recorder, analysis: Analysis, records: list[InputRecord]) -> None:
    """Views of memory that is both moved and made to require grad: autograd asks them when they are looked at next.

    So are views of a view that `set_` leaves without a derivative, and views made several at once.
    """
    inputs = {id(record.stand_in) for record in records}
    replaced = recorder.changes.replaced.items()
    moved = {id(old.storage): key for key, (old, is_set) in replaced if key in inputs and not is_set}
    set_again = {id(old.storage): key for key, (old, is_set) in replaced if key in inputs and is_set}
    swapped_memory = {*set_again, *moved}
    moved |= {id(recorder.values[e.tensor].storage): e.tensor for e in recorder.changes.log.events if e.op in RESIZES}
    marked = {id(r.initial.storage) for r in records if r.stand_in.requires_grad and not r.real.requires_grad}
    barred = {r.input: is_view(records[r.input].real) for r in _set_with_gradients(analysis.swaps)}
    bases = {id(base_of(records[index].real)) for index, is_of_view in barred.items() if is_of_view}
    barred |= {i: False for i, r in enumerate(records) if bases & {id(r.real), id(base_of(r.real))} and i not in barred}
    for at, leaf in analysis.aliases if moved or barred or set_again else ():
        info = analysis.outputs[at]
        if not isinstance(info, AliasOutput) or info.input is None or not is_view(leaf):
            continue
        if analysis.is_of_swapped(info):
            continue
        record = records[info.input]
        storage = id(record.initial.storage)
        is_of_barred = info.input in barred and leaf.requires_grad
        is_of_barred &= barred.get(info.input, False) or any(step.index is not None for step in info.steps)
        is_many = leaf.requires_grad and any(step.index is not None for step in info.steps)
        is_of_written = storage in moved and is_many and record.initial.storage.is_written
        # `set_` moves the version that the view was taken at.
        is_early = analysis.is_early(info)
        is_of_marked = storage in moved and storage in marked
        is_of_detached = storage in swapped_memory and record.detached_at is not None and is_moved(record)
        is_before_set = is_early and storage in set_again and storage in marked
        if is_of_barred or is_of_written or is_before_set or is_of_marked or is_of_detached:
            key = id(record.stand_in) if is_of_barred else {**set_again, **moved}[storage]
            raise UnsupportedAliasError(
                f"the output {info.path} is a view in the memory of {record.slot}, which the function makes require "
                "grad, detaches in place or calls `set_` on, and where a tensor is resized or given other memory at "
                f"{user_line(recorder.changes.changed_at.get(key))}: return a copy."
            )


def _set_with_gradients(swaps: Sequence[Recorded]) -> list[SetStorage]:
    effects = [swap.effect for swap in swaps]
    return [effect for effect in effects if isinstance(effect, SetStorage) and effect.grad_enabled]


def views_of_written(memory: list[tuple[InputRecord, list[InputRecord]]], recorder: Recorder) -> set[int]:
    """The views among the inputs, by id, that share memory that was written and require grad, or do so then."""
    found: set[int] = set()
    for whole, members in memory:
        gained = any(r.stand_in.requires_grad and not r.real.requires_grad for r in members)
        storage = whole.initial.storage
        detached = [
            e for e in recorder.changes.log.events if e.what is Happened.DETACHED and e.value.storage is storage
        ]
        if len(storage.changes) > len(detached):  # views of what is only detached stay what they are
            everyone = any(r.detached_at is not None and is_moved(r) for r in members)
            known = members if everyone else _known_as_written(members)
            views = [r for r in known if is_view(r.real) and (r.real.requires_grad or gained)]
            changed = recorder.changes.changed_at
            resized = [changed[id(r.stand_in)] for r in members if id(r.stand_in) in changed]
            _check_views(views, next(iter(resized), whole.initial.read(recorder.emit).origin))
            found |= {id(r.real) for r in views}
    return found


def _check_views(records: list[InputRecord], origin: Origin | None) -> None:
    """Views are taken again by strides, and by those gradients go alike to all elements that are in one place."""
    for record in records:
        base = base_of(record.real)
        if base is not None and base.requires_grad and _spreads_otherwise(record.real, base):
            raise UnsupportedAliasError(
                f"{record.slot} is a view of a tensor that has several elements in one place (`expand`), or is "
                f"`as_strided` of a view, and that memory is written to at {user_line(origin)}: its gradient can't be "
                "captured. Pass a view of a copy."
            )


def _spreads_otherwise(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a gradient of the view goes to other elements of the base than by the strides of the two."""
    steps: list[Any] = []
    node = history_of(view)
    while node is not None and node is not history_of(base) and not hasattr(node, "variable"):
        steps.append(node)
        node = node.next_functions[0][0] if node.next_functions else None
    by_strides = [step.name().startswith("AsStrided") for step in steps]
    if TensorSpec.of(base).overlaps_itself and by_strides != [True]:
        return True
    inner_ones = [inner for outer, inner in zip(by_strides, steps[1:], strict=False) if outer]
    whole = base.numel() * base.itemsize // view.itemsize  # in elements of the view's dtype
    return any(_overlaps(inner) or _numel(inner) < whole for inner in inner_ones)


def _numel(step: Any) -> int:
    """How many elements the view that this node is of has."""
    return math.prod(step._input_metadata[0].shape)


def _overlaps(step: Any) -> bool:
    """Whether the view that this node is of has several elements in one place."""
    if not step.name().startswith("AsStrided"):
        return bool(step.name().startswith(("Expand", "Unfold")))
    size, stride = step._saved_size, step._saved_stride
    return TensorSpec(tuple(size), tuple(stride), torch.uint8, torch.device("cpu")).overlaps_itself


def is_set_again(recorder: Recorder, record: InputRecord) -> bool:
    """Whether `set_` replaced the input, and may do so again: an input that is a leaf by then loses its gradient."""
    _, is_set = recorder.changes.replaced.get(id(record.stand_in), (None, False))
    stand_in = record.stand_in
    return is_set and not is_marked(stand_in)


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


def _known_as_written(records: list[InputRecord]) -> list[InputRecord]:
    """Those whose version counter was moved, by a write to them or to another one that shares it."""
    usual = [record for record in records if not record.real.is_inference()]
    moved = [record.real for record in usual if is_moved(record)]
    return [record for record in usual if any(share_counters(record.real, real) for real in moved)]
