"""Tensors that come into a compiled graph from outside, laid out as it was captured with."""

from __future__ import annotations

import torch

from .._torch.symbols import concrete, is_symbolic
from ..graph.meta import TensorSpec

__all__ = ["as_captured", "in_order", "laid_out", "memory_order"]


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A dense copy with these strides; a sparse tensor's strides are all zero, so that it comes here."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def memory_order(spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions of a dense tensor of symbolic sizes, outermost in memory first."""
    dims = range(len(spec.shape))
    return tuple(sorted(dims, key=lambda dim: (-concrete(spec.stride[dim]), dim)))


def in_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The tensor laid out densely with its dimensions in that order."""
    shape = tensor.shape
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    wanted = tuple(stride)
    return tensor if tensor.stride() == wanted else laid_out(tensor, wanted)


def as_captured(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor laid out as `spec` says, copied only where it must be."""
    if any(map(is_symbolic, spec.stride)):
        return in_order(tensor, memory_order(spec))
    return tensor if tensor.stride() == spec.stride else laid_out(tensor, spec.stride)
