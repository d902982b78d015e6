"""Functions that rendered code calls to write into tensors and to give outputs their history."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import engine
from .._torch.tensors import is_view
from ..graph.meta import TensorSpec


def write_with_history(target: torch.Tensor, value: torch.Tensor) -> None:
    """`target` takes the elements and the autograd history of `value`.

    Its earlier history is an input of the autograd node already: a copy would also send it zeros.
    """
    if not is_view(target) and not target.retains_grad:
        target.detach_()
    target.copy_(value)


def write_overlapping(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a tensor whose elements overlap in memory; overlapping elements of `value` are equal."""
    for dim in range(target.dim()):
        if target.stride(dim) == 0 and target.size(dim) > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if TensorSpec.of(target).overlaps_itself:
        for part, new in zip(target.unbind(0), value.unbind(0), strict=True):
            write_overlapping(part, new)
    else:
        target.copy_(value)


class _OverlappingWrite(torch.autograd.Function):
    """An in-place write to autograd, on a tensor that `copy_` does not take."""

    @staticmethod
    def forward(ctx: Any, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(target)
        write_overlapping(target.detach(), value)
        return target

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


def write_overlapping_with_history(target: torch.Tensor, value: torch.Tensor) -> None:
    """`write_with_history` for a tensor whose elements overlap in memory; overlapping elements of `value` are equal."""
    if not is_view(target) and not target.retains_grad:
        target.detach_()
    _OverlappingWrite.apply(target, value)


class _History(torch.autograd.Function):
    """Tensors that require grad and are no leaves, and whose gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, nobody: torch.Tensor, tensors: list[torch.Tensor], error: Exception | None) -> Any:
        ctx.error = error
        return tuple(tensor.data for tensor in tensors)  # without their view relations

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.error is not None:
            raise type(ctx.error)(*ctx.error.args)
        return None, None, None


_history = engine.direct_apply(_History)
_nobody = torch.empty(0, requires_grad=True)


def with_history(tensors: list[torch.Tensor], error: Exception | None = None) -> tuple[torch.Tensor, ...]:
    """The tensors as results of a differentiable operator without a path to any input.

    `error`: the exception of their backward.
    """
    result: tuple[torch.Tensor, ...] = _history(_nobody, tensors, error)
    return result
