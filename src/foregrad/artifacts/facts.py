"""Questions about arguments, besides their values, that a program asked and that an artifact asks at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch.hooks import UNHOOKED, gradient_hooks

__all__ = ["QUESTIONS"]

QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "{}.is_leaf": lambda x: x.is_leaf,
    "{}._version": lambda x: x._version,
    "{}._base is None": lambda x: x._base is None,
    "{}.storage_offset()": lambda x: x.storage_offset(),
    "{}.untyped_storage().nbytes()": lambda x: x.untyped_storage().nbytes(),
    "{}._backward_hooks is None": lambda x: x._backward_hooks is None,
    "{}.retains_grad": lambda x: x.retains_grad,
    "{}.is_shared()": lambda x: x.is_shared(),
    "{}.is_pinned()": lambda x: x.is_pinned(),
    "{}.grad is None": lambda x: x.grad is None,
    "{0}.is_leaf and {0}.grad is None": lambda x: x.is_leaf and x.grad is None,
    UNHOOKED: lambda x: not gradient_hooks(x),
}
