"""What autograd is told of views whose gradients it takes by their place in memory, and views that it takes wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import (
    allows_writes,
    base_of,
    is_marked,
    is_usable,
    is_view,
    leads_to_base,
    storage_key,
)
from ...graph.meta import TensorSpec
from ..heap.refusals import resized_view
from .overlapping_views import OverlappingViews

__all__ = ["ViewTracking"]


class ViewTracking:
    """Views by strides. `where()`: the user's line.

    `stale`: views of another dtype whose base changed its sizes, and where.
    """

    def __init__(self, where: Callable[[], str], overlapping: OverlappingViews | None) -> None:
        self.where, self.overlapping = where, overlapping
        self.stale: list[tuple[torch.Tensor, str]] = []

    def as_strided(self, result: Any, args: tuple[Any, ...]) -> Any:
        """A view by strides, by its place in the base's memory; past the edges of a view only once that is written."""
        view = _by_strides(result, args, is_strided=True)
        is_of_view = view is not result and view.requires_grad and args[0] is not base_of(view)
        if self.overlapping is None or not is_of_view or TensorSpec.of(args[0]).holds(TensorSpec.of(view)):
            return view
        self.overlapping.watch(result)
        return result

    def by_strides(self, result: Any, args: tuple[Any, ...]) -> Any:
        """What an operator gave, views by strides."""
        if self.overlapping is not None and self.overlapping.watched and args and self.overlapping.is_watched(args[0]):
            return result
        return _by_strides(result, args)

    def check_stale(self, result: Any, args: tuple[Any, ...]) -> None:
        """Raise for a view of a view whose base has other sizes by now: its gradients do not fit those."""
        if not self.stale:
            return
        first = result[0] if type(result) in (tuple, list) and result else result
        if not is_stand_in(first) or not (is_view(first) and first.requires_grad):
            return
        for view, where in self.stale:
            if any(arg is view for arg in args) and first is not view:
                raise resized_view(f"{where}, and taken again at {self.where()}")


def _by_strides(result: Any, args: tuple[Any, ...], is_strided: bool = False) -> Any:
    """A view as eager takes it up again once its base was written: by its place in the base's memory.

    Of fakes autograd remembers the operator that made the view; should the sizes of the base change in place, that
    would give another view.
    """
    if type(result) is tuple or type(result) is list:
        return type(result)(_by_strides(item, args) for item in result)
    if not is_stand_in(result) or not is_view(result) or any(result is arg for arg in args):
        return result
    base = base_of(result)
    if base is None or not allows_writes(result) or not torch.is_grad_enabled():
        return result
    is_of_leaf = args and is_stand_in(args[0]) and is_view(args[0]) and is_marked(args[0])
    is_of_leaf = is_of_leaf or (result.requires_grad and is_usable(result) and not leads_to_base(result))
    is_of_detached = result.requires_grad and not base.requires_grad
    if is_of_leaf or is_of_detached or storage_key(base) != storage_key(result):
        return result  # of what the base was before `.data = ...`, or `detach_`, or of a leaf that is a view itself
    if result.is_conj() or result.is_neg() or base.is_conj() or base.is_neg():
        return result
    if base.is_complex() and result.dtype is base.dtype.to_real():
        base = torch.view_as_real(base)
        if TensorSpec.of(base) == TensorSpec.of(result):
            return result  # taken again by the operator alone
    overlaps = TensorSpec.of(base).overlaps_itself or (TensorSpec.of(result).overlaps_itself and not is_strided)
    if base.dtype is not result.dtype or overlaps:
        return result  # gradients of elements in one place are others then
    return base.as_strided(result.shape, result.stride(), result.storage_offset())
