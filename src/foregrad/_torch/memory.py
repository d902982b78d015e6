"""Ownership of a tensor's memory. Checked on torch 2.13.0.

Reference counts decide: Python's to the tensor and to its storage, PyTorch's to either.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .native import native

__all__ = ["has_storage", "owned", "owned_in_python"]

Owned = Callable[[list[Any], tuple[int, ...]], bool]


def owned() -> Owned:
    """`owned()(values, positions)`: whether only the list `values` refers to the memory of its tensors there."""
    module = native()
    return owned_in_python if module is None else module.owned


def owned_in_python(values: list[Any], positions: Sequence[int]) -> bool:
    """The Python version of the C++ function."""
    alone = _alone()
    return all(_is_plain(values[i]) and _counts(values, i) == alone for i in positions)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own; a transform's wrapper or a sparse tensor has none."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_plain(tensor: Any) -> bool:
    """Whether the memory is PyTorch's. Memory that can't grow belongs to another library, which counts no users."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.untyped_storage().resizable()


def _counts(values: list[Any], i: int) -> tuple[int, ...]:
    references = sys.getrefcount(values[i])
    storage = values[i].untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    return references, values[i]._use_count(), sys.getrefcount(storage), users


@functools.cache
def _alone() -> tuple[int, ...]:
    """The counts of a tensor that only a list holds. The query itself adds some, which depend on the version."""
    return _counts([torch.empty(1)], 0)
