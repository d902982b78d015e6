"""What the signature says of a tensor input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._torch.tensors import base_of, history_of, is_usable, is_view
from ...errors import UnsupportedMutationError
from ...graph.signature import BaseOf, InputInfo, MemoryOf
from ..heap.records import InputRecord
from ..tape.gradient_paths import is_barred

__all__ = ["input_info"]


def input_info(
    record: InputRecord,
    index: int,
    number: dict[int, int],
    shared_of: dict[int, int],
    where: Callable[[torch.Tensor], str],
) -> InputInfo:
    """`where` gives the line that changed a tensor in place."""
    source: Any = record.source
    if index in shared_of:
        source = MemoryOf(shared_of[index])
    elif isinstance(source, InputRecord):
        source = BaseOf(number[id(source)])
    becomes = (
        index not in shared_of
        and record.stand_in.requires_grad
        and not record.real.requires_grad
        and history_of(record.stand_in) is None
        and (record.is_called or not _is_marked_through_base(record.stand_in))
    )
    detached = index not in shared_of and record.real.requires_grad and is_usable(record.stand_in)
    marked = index not in shared_of and record.is_marked and history_of(record.stand_in) is None
    # A view can't be detached in place: it loses its history to a change of its base, here as in eager.
    detached = detached and history_of(record.stand_in) is None and not is_view(record.real)
    if detached and not record.real.is_leaf and record.stand_in.requires_grad:
        raise UnsupportedMutationError(
            f"{record.slot} has a history, and the function makes it a leaf that requires grad (`detach_` at "
            f"{where(record.stand_in)}, then `requires_grad_`): use a detached tensor of its own instead."
        )
    left_behind = record.detached_at is not None and is_barred(history_of(record.stand_in))  # by a `set_` since
    return InputInfo(
        slot=record.slot,
        spec=record.spec,
        requires_grad=index not in shared_of and record.real.requires_grad,
        is_leaf=record.real.is_leaf,
        argument=None if index in shared_of else record.argument,
        source=source,
        becomes_differentiable=becomes,
        detached=(detached and not record.stand_in.requires_grad) or left_behind,
        marked=marked and record.stand_in.requires_grad,
    )


def _is_marked_through_base(tensor: torch.Tensor) -> bool:
    base = base_of(tensor) if is_view(tensor) else None
    return base is not None and base.requires_grad
