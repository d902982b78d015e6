"""Facts about tensors that have no public name. Checked on torch 2.13.0."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["base_of", "is_view", "is_wrapper_subclass", "storage_key", "version_of", "view_again"]


def storage_key(tensor: torch.Tensor) -> int:
    """A number equal for tensors that share their memory."""
    return tensor.untyped_storage()._cdata


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd knows this one to be a view of."""
    return tensor._base


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor to be a view."""
    return tensor._is_view()


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's memory was written to in place."""
    return tensor._version


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` that `view` is of its own base, whatever the two tensors' kinds."""
    return view._view_func_unsafe(base)  # type: ignore[no-any-return, attr-defined]


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether the tensor only wraps others, or handles its operators itself."""
    return is_traceable_wrapper_subclass(tensor) or (
        type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if hasattr(torch.Tensor, "__torch_dispatch__")
        else hasattr(type(tensor), "__torch_dispatch__")
    )
