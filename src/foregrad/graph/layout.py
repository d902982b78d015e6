"""Tensors that enter a compiled graph from outside, in the layout of its capture."""

from __future__ import annotations

import torch

from .._torch.symbols import concrete, is_symbolic
from .meta import TensorSpec


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A dense copy with these strides; sparse tensors get here too, since their strides are all zero."""
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
    strides = tuple(stride)
    return tensor if tensor.stride() == strides else laid_out(tensor, strides)


def as_captured(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor in the layout of `spec`, copied only if it must be."""
    if any(map(is_symbolic, spec.stride)):
        return in_order(tensor, memory_order(spec))
    return tensor if tensor.stride() == spec.stride else laid_out(tensor, spec.stride)
