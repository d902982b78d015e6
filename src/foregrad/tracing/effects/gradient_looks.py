"""Inputs that change sizes, layout or dtype and have gradients.

Autograd fixes the shape and dtype of a gradient from the input when the node is created. So the node is created after
some of the changes; others are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..._torch.tensors import base_of, is_marked, is_view
from ...errors import UnsupportedMutationError
from ...graph.effect_log import InplaceView, SetStorage
from ...graph.meta import TensorSpec
from ...graph.signature import Handle
from ..heap.metadata_changes import Event
from ..heap.records import InputRecord
from ..heap.refusals import changed_with_gradients
from ..recorder.recorder import Recorder
from ..tape.gradient_paths import nodes_behind
from .analysis import Analysis
from .storage_swap import RESIZES

__all__ = ["changes_look", "check_sizes", "fitting"]


def check_sizes(
    recorder: Recorder, analysis: Analysis, records: list[InputRecord], gradients: Sequence[Any]
) -> frozenset[int]:
    """Inputs whose gradient has the metadata that they get during the call. Their autograd node must be created after
    that change. Other changes of an input with a gradient are refused.
    """
    late: set[int] = set()
    log = recorder.changes.log
    reshaped = {index for index, r in enumerate(records) if log.of(r.stand_in, InplaceView)}
    grown = [log.changes_of(r.stand_in) for r in records]
    resized = {index for index, changes in enumerate(grown) if any(event.op in RESIZES for event in changes)}
    marked = {index for index in reshaped | resized if not records[index].real.requires_grad}
    for event in log.events:
        value = recorder.values.get(event.tensor)
        fake = None if value is None or not isinstance(event.effect, SetStorage) else value.fake
        is_own = fake is not None and is_view(fake) and all(fake is not r.stand_in for r in records)
        if is_own and fake.requires_grad and event.after.spec.offset != event.value.spec.offset:  # type: ignore[union-attr]
            raise changed_with_gradients("a view", recorder.changes.where(fake))
    with_history = [fake for fake in analysis.fakes if fake is not None]
    for index in {*analysis.replaced, *resized, *marked}:
        record = records[index]
        _, is_set = recorder.changes.replaced.get(id(record.stand_in), (None, False))
        if record.real.is_leaf and _is_parted(with_history, record.leaf):
            raise _refused(recorder, record)
        if index in resized and record.real.requires_grad and record.stand_in.requires_grad:
            raise _refused(recorder, record)  # it was detached in between
        gradient = gradients[index]
        is_as_before = gradient is not None and gradient.spec.shape == record.spec.shape and index not in resized
        is_as_before &= gradient is None or gradient.spec.dtype is record.spec.dtype
        views = _views_of_it(analysis, index)
        of_it = [r for r in records if is_set and record.real.is_leaf and base_of(r.real) is record.real]
        if (
            gradient is not None
            and not (is_as_before or views or of_it)
            and _has_looked(recorder, record, gradient.spec)
        ):
            late.add(index)
            continue
        is_elsewhere = is_view(record.real) and record.stand_in.storage_offset() != record.spec.offset
        if is_set and is_elsewhere and gradients[index] is not None:
            raise _refused(recorder, record)
        other_size = index in resized or record.stand_in.shape != record.spec.shape
        # A view that was taken of it before has its gradients flow there by itself.
        other_size |= record.stand_in.dtype is not record.spec.dtype
        flows = gradient is not None and not is_as_before
        flows |= bool(views and index not in resized and record.real.requires_grad)
        other_layout = other_size or record.stand_in.stride() != record.spec.stride
        if (other_size and flows) or (other_layout and of_it and record.real.requires_grad):
            raise _refused(recorder, record)
    return frozenset(late)


def _views_of_it(analysis: Analysis, index: int) -> list[Handle]:
    """Outputs that are views of what an input was before it was given other memory."""
    outputs = [o for o in analysis.outputs if isinstance(o, Handle) and o.input == index and o.steps]
    return [o for o in outputs if not analysis.is_of_swapped(o)]


def _refused(recorder: Recorder, record: InputRecord) -> UnsupportedMutationError:
    return changed_with_gradients(str(record.slot), recorder.changes.where(record.stand_in))


def _looks(recorder: Recorder, record: InputRecord) -> list[TensorSpec]:
    """What an input was, and what it is after each change of its memory or sizes."""
    events = recorder.changes.log.changes_of(record.stand_in)
    return [record.spec, *(_after(event) for event in events)]


def _after(event: Event) -> TensorSpec:
    after = event.value.became if event.after is None else event.after
    assert after is not None
    return after.spec


def _is_alike(one: TensorSpec, other: TensorSpec) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype


def changes_look(recorder: Recorder, record: InputRecord) -> bool:
    """Whether a leaf that requires grad has other sizes or another dtype for some time: all its swaps matter then."""
    is_leaf = record.stand_in.requires_grad and record.real.is_leaf
    return is_leaf and not all(_is_alike(record.spec, look) for look in _looks(recorder, record))


def _has_looked(recorder: Recorder, record: InputRecord, spec: TensorSpec) -> bool:
    """Whether a leaf, which is no view, has looked as its gradient does once it had changed."""
    stand_in = record.stand_in
    if is_view(record.real) or is_view(stand_in) or not is_marked(stand_in) or not record.real.is_leaf:
        return False
    return any(_is_alike(spec, look) for look in _looks(recorder, record)[1:])


def fitting(recorder: Recorder, records: Sequence[InputRecord], gradients: Sequence[Any]) -> dict[int, set[int]]:
    """For inputs that change, after how many of their changes the node may be made: see `attached`."""
    found: dict[int, set[int]] = {}
    for index, (record, gradient) in enumerate(zip(records, gradients, strict=True)):
        events = recorder.changes.log.changes_of(record.stand_in)
        if gradient is None or not events:
            continue
        if not record.real.is_leaf or is_view(record.real):  # its gradients are those of its history, which changes
            found |= (
                {index: {0}} if any(isinstance(event.effect, (InplaceView, SetStorage)) for event in events) else {}
            )
        elif changes_look(recorder, record):
            looks = enumerate(_looks(recorder, record))
            resized = max((at for at, event in enumerate(events, start=1) if event.op in RESIZES), default=0)
            found[index] = {at for at, look in looks if _is_alike(look, gradient.spec) and at >= resized}
    return found


def _is_parted(outputs: Sequence[torch.Tensor], leaf: torch.Tensor | None) -> bool:
    """Whether gradients flow to what the leaf was: `set_`, or another dtype, parts it from its accumulator."""
    if leaf is None:
        return False
    ends = [node for node in nodes_behind(outputs) if getattr(node, "variable", None) is leaf]
    return bool(ends) and any(node is not get_gradient_edge(leaf).node for node in ends)
