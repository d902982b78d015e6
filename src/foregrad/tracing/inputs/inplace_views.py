"""Sizes of a view changed in place while autograd watches: `t_`, `transpose_`, `squeeze_`, `unsqueeze_`.

Once what it is a view of is written, eager takes such a view up again by the places that it has by then. Of fakes
autograd remembers the operators that made a view, and would take the places that it had before. So the tensor is made
a view taken anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..._torch.tensors import (
    allows_writes,
    base_of,
    exchange,
    is_view,
    kind_of,
    leads_to_base,
    storage_key,
    version_of,
    view_again,
)
from ..heap.recording import Recording
from ..heap.records import InputRecord, is_of_another_kind
from ..heap.refusals import resized_view
from ..tape.origin import user_line

if TYPE_CHECKING:
    from ..heap.alias import Value

__all__ = ["RESHAPERS", "become", "check_reshaped", "reshape_view"]

aten = torch.ops.aten
_TENSOR: Any = torch.Tensor
RESHAPERS = {_TENSOR.t_, _TENSOR.transpose_, _TENSOR.swapaxes_, _TENSOR.swapdims_, _TENSOR.unsqueeze_, _TENSOR.squeeze_}


def reshape_view(
    recorder: Recording,
    by_stand_in: Mapping[int, InputRecord],
    stale: list[tuple[torch.Tensor, str]],
    func: Any,
    tensor: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: Any,
) -> Any:
    """`func(tensor, *args)`; NotImplemented where autograd does not watch, or `tensor` is no view.

    To `stale` come views, and where, that autograd would take again with other sizes than they have.
    """
    if not is_view(tensor):
        record = by_stand_in.get(id(tensor))
        is_base, before = record is None or not is_view(record.real), version_of(tensor)
        result = _take_views_again(recorder, stale, func, tensor, args, kwargs, is_base=is_base)
        if record is not None and is_of_another_kind(record):
            _note(recorder, tensor, before)
        return result
    base = base_of(tensor)
    if base is None or kwargs or not (tensor.requires_grad and torch.is_grad_enabled() and allows_writes(tensor)):
        return NotImplemented
    if storage_key(base) != storage_key(tensor):
        raise resized_view(user_line(recorder.origins.here()))
    if base.is_complex() and tensor.dtype is base.dtype.to_real():
        base = torch.view_as_real(base)
    before = version_of(tensor)
    if base.dtype is not tensor.dtype:
        func(tensor, *args)
        _note(recorder, tensor, before)
        return tensor
    if base.is_leaf:
        return NotImplemented  # which raises
    if tensor.is_conj() or tensor.is_neg() or base.is_conj() or base.is_neg():
        raise resized_view(user_line(recorder.origins.here()))
    record = by_stand_in.get(id(base))
    outer = base_of(record.real) if record is not None and is_view(record.real) else None
    if outer is not None and outer.requires_grad and outer.is_leaf and leads_to_base(record.real):  # type: ignore[union-attr]
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
    other_dtype = base_of(tensor).dtype is not tensor.dtype  # type: ignore[union-attr]
    events = recorder.changes.log.events
    moved = tensor.detach()
    func(moved, *args)
    event = events.pop()
    again = base.as_strided(moved.shape, moved.stride(), moved.storage_offset())
    become(recorder, tensor, again, resized_view(user_line(recorder.origins.here())))
    events.append(dataclasses.replace(event, tensor=id(tensor), grad_enabled=True))
    if other_dtype:
        _note(recorder, tensor, before)
    return tensor


def _note(recorder: Recording, tensor: torch.Tensor, before: int) -> None:
    """The sizes of a view that can't be written to any more were changed; it was of the version `before` until then."""
    others = [known for known in recorder.reshaped if known[0] is not tensor or known[1] != before]
    recorder.reshaped = [*others, (tensor, version_of(tensor), user_line(recorder.origins.here()))]


def _take_views_again(
    recorder: Recording,
    stale: list[tuple[torch.Tensor, str]],
    func: Any,
    tensor: torch.Tensor,
    args: Any,
    kwargs: Any,
    *,
    is_base: bool,
) -> Any:
    """`func(tensor, *args)`; views that were taken of `tensor` before stay views of the places that they had.

    Not so those of another dtype, or conjugated, where it is no view itself: eager takes them again by their operator.
    """
    spec = recorder.value_of(tensor).spec
    values = [value for value in list(recorder.values.values()) if _is_view_of(value, tensor)]
    fakes = [value.fake for value in values if value.fake is not None]
    views = [fake for fake in fakes if not is_base or kind_of(fake) == kind_of(tensor)]
    where = user_line(recorder.origins.here())
    stale += [(fake, where) for fake in fakes if all(fake is not view for view in views)]
    result = func(tensor, *args, **kwargs)
    if views:
        with torch.enable_grad():
            before = tensor.as_strided(spec.shape, spec.stride, spec.offset)
            for view in views:
                value = recorder.value_of(view)
                become(recorder, view, view_again(view, before), resized_view(where))
                recorder.values[id(view)], value.fake = value, view  # what it is in memory it was before
    return result


def _is_view_of(value: Value, tensor: torch.Tensor) -> bool:
    """Whether the value's is a view that autograd knows of, by the operator that made it."""
    fake = value.fake
    if fake is None or value.view is None or value.view.op is aten.as_strided.default or not fake.requires_grad:
        return False
    if not is_view(fake) or base_of(fake) is not tensor or storage_key(fake) != storage_key(tensor):
        return False
    return allows_writes(fake) and leads_to_base(fake)


def become(recorder: Recording, tensor: torch.Tensor, new: torch.Tensor, refused: Exception) -> None:
    """The object `tensor` is to be the view `new` from here on. Raises `refused` where autograd has saved it."""
    value, old = recorder.value_of(new), recorder.value_of(tensor)
    try:
        exchange(tensor, new)
    except RuntimeError:
        raise refused from None
    if old.fake is tensor:
        old.fake = None
    value.fake = tensor
    recorder.kept += [tensor, new]
    recorder.values[id(tensor)] = value


def check_reshaped(recorder: Recording) -> None:
    """Raise for views of another dtype that are written to once their sizes were changed, or their base is."""
    for tensor, version, where in recorder.reshaped:
        if tensor.requires_grad and version_of(tensor) != version:
            raise resized_view(where)
