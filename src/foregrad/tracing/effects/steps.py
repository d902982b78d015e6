"""The way from one tensor to a view of it, and when each step of it is taken."""

from __future__ import annotations

import dataclasses

from ..._torch.tensors import allows_writes, is_view
from ...errors import UnsupportedAliasError
from ...graph.signature import ViewStep, When
from ..heap.alias import Value, View
from ..heap.records import InputRecord, is_moved, is_unlinked
from .output_alias_sets import SHARED_THROUGH_REPLACED

__all__ = ["steps_between"]


def steps_between(
    value: Value, base: Value, record: InputRecord | None = None, *, marked: bool = False
) -> tuple[ViewStep, ...]:
    """The way from `base`, the tensor of an input where `record` is given, to `value`.

    `marked`: the function calls `requires_grad_()` on the base.
    """
    is_marked = record is not None and record.stand_in.requires_grad and not record.real.requires_grad
    marked = marked or is_marked or (record is not None and record.is_marked)
    at_start = record is not None and base is record.initial
    detached_at = None if record is None else record.detached_at
    # Once it is written, while what it is a view of still requires grad.
    bars_views = marked or (record is not None and is_unlinked(record) and record.stand_in.requires_grad)
    # Of one of several views made at once none may be taken once a version moves, be it of other memory by now.
    is_one_of_several = record is not None and is_view(record.real) and not allows_writes(record.real)
    counts_elsewhere = is_one_of_several and record is not None and is_moved(record) and not value.storage.clock
    steps = []
    while value is not base:
        view = value.view
        if not isinstance(view, View) or value.parent is None:
            raise UnsupportedAliasError(SHARED_THROUGH_REPLACED)
        steps.append(
            ViewStep(
                view.op,
                view.args,
                tuple(view.kwargs.items()),
                view.index,
                id(view.call),
                view.grad_enabled,
                When.AT_LAST
                if record is None and (not marked or value.of_differentiable)
                else _when(value, at_start, marked, bars_views, detached_at, counts_elsewhere),
            )
        )
        value = value.parent
    steps.reverse()
    for at in range(1, len(steps)):
        above, step = steps[at - 1], steps[at]
        # Of a view that was taken under no_grad none may be taken, but under no_grad, once its base is written.
        is_barred_then = step.grad_enabled and not above.grad_enabled and detached_at is None and not marked
        when = above.when if is_barred_then else max(above.when, step.when)
        if when != step.when:
            steps[at] = dataclasses.replace(step, when=when)
    return tuple(steps)


def _when(
    value: Value, at_start: bool, marked: bool, bars_views: bool, detached_at: int | None, counts_elsewhere: bool
) -> When:
    if marked and not value.of_differentiable:
        is_written_later = at_start and value.born < value.storage.clock
        return When.BEFORE_MARKS if value.born and not is_written_later else When.AT_FIRST
    if detached_at is not None and value.born <= detached_at:
        return When.BEFORE_WRITES
    before = value.born < (value.storage.clock if bars_views else min(value.storage.clock, 1))
    return When.BEFORE_WRITES if before or counts_elsewhere else When.AT_LAST
