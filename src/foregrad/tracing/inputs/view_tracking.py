"""What autograd is told of views whose gradients it takes by their place in memory, and views that it takes wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._torch.fakes import FakeTensor
from ..._torch.tensors import (
    allows_writes,
    base_of,
    history_of,
    is_marked,
    is_usable,
    is_view,
    leads_to_base,
    storage_key,
)
from ...graph.meta import TensorSpec
from ..heap.refusals import past_the_edges, resized_view
from ..tape.gradient_paths import nodes_behind

__all__ = ["ViewTracking"]


class ViewTracking:
    """Views by strides. `where()`: the user's line.

    `stale`: views of another dtype whose base changed its sizes, and where.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self.out_of_bounds_views: list[
            tuple[Any, torch.Tensor | None, str]
        ] = []  # a history, or whose by then; where taken
        self.stale: list[tuple[torch.Tensor, str]] = []

    def as_strided(self, result: Any, args: tuple[Any, ...]) -> Any:
        """A view by strides, by its place in the base's memory; one of others than its source's elements is noted."""
        view = _by_strides(result, args, is_strided=True)
        base = base_of(view)
        is_of_view = view is not result and view.requires_grad and args[0] is not base
        if is_of_view and not TensorSpec.of(args[0]).holds(TensorSpec.of(view)):
            self._note_out_of_bounds_view(view, self.where())
        return view

    def _note_out_of_bounds_view(self, view: torch.Tensor, where: str) -> None:
        base = base_of(view)
        self.out_of_bounds_views.append((history_of(view), None, where))
        if base is not None and base.dtype is not view.dtype:
            self.out_of_bounds_views.append((None, view, where))

    def by_strides(self, result: Any, args: tuple[Any, ...]) -> Any:
        """What an operator gave, views by strides; views of an out-of-bounds view are out of bounds too."""
        taken = _by_strides(result, args)
        if self.out_of_bounds_views and args and isinstance(args[0], FakeTensor) and args[0].requires_grad:
            given = taken if type(taken) in (tuple, list) else (taken,)
            views = [view for view in given if type(view) is FakeTensor and is_view(view)]
            # Asked only where there is one: autograd may hold the lock of a history that has hooks put on it.
            source = history_of(args[0]) if views else None
            where = next((where for history, _, where in self.out_of_bounds_views if history is source), None)
            for view in views:
                if where is not None and history_of(view) is not source:
                    self._note_out_of_bounds_view(view, where)
        return taken

    def check_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise where gradients go through an out-of-bounds view as it was taken: eager's end at its source's edges.

        Once its memory was written to, eager takes it up again by its place in the base's memory; of another dtype than
        the base, by its source still.
        """
        behind = set(nodes_behind(outputs)) if self.out_of_bounds_views else set()
        for history, view, where in self.out_of_bounds_views:
            if (history if view is None else history_of(view)) in behind:
                raise past_the_edges(where)

    def check_stale(self, result: Any, args: tuple[Any, ...]) -> None:
        """Raise for a view of a view whose base has other sizes by now: its gradients do not fit those."""
        if not self.stale:
            return
        first = result[0] if type(result) in (tuple, list) and result else result
        if type(first) is not FakeTensor or not (is_view(first) and first.requires_grad):
            return
        for view, where in self.stale:
            if any(arg is view for arg in args) and first is not view:
                raise resized_view(f"{where}, and taken again at {self.where()}")

    def check_out_of_bounds(self, tensor: torch.Tensor) -> None:
        """Raise for an out-of-bounds view whose own sizes change: it is taken anew then."""
        for history, _, where in self.out_of_bounds_views:
            if history is not None and history is history_of(tensor):
                raise past_the_edges(where)


def _by_strides(result: Any, args: tuple[Any, ...], is_strided: bool = False) -> Any:
    """A view as eager takes it up again once its base was written: by its place in the base's memory.

    Of fakes autograd remembers the operator that made the view; should the sizes of the base change in place, that
    would give another view.
    """
    if type(result) is tuple or type(result) is list:
        return type(result)(_by_strides(item, args) for item in result)
    if type(result) is not FakeTensor or not is_view(result) or any(result is arg for arg in args):
        return result
    base = base_of(result)
    if base is None or not allows_writes(result) or not torch.is_grad_enabled():
        return result
    is_of_leaf = args and type(args[0]) is FakeTensor and is_view(args[0]) and is_marked(args[0])
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
