"""Hooks on the outputs of compiled functions. Checked on torch 2.13.0.

A node of several outputs runs when a gradient comes in for one of them, and autograd calls the hooks of all. In eager
each output has operators of its own, whose hooks are not called where nothing comes in.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["before_hooks", "only_defined"]


class _OnlyDefined(collections.OrderedDict[Any, Any]):
    """The hooks of a tensor, none of which is called with None."""

    def __setitem__(self, key: Any, hook: Any) -> None:
        # Those of several tensors count their calls, and expect one for each tensor whose node runs.
        counts = getattr(hook, "__module__", "") == torch.autograd.graph.__name__
        super().__setitem__(key, hook if counts else functools.partial(_unless_none, hook))


def _unless_none(hook: Callable[[Any], Any], gradient: Any) -> Any:
    return None if gradient is None else hook(gradient)


def only_defined(tensor: Any) -> None:
    """Before the first hook of a result is registered: none is to be called with None."""
    tensor._backward_hooks = _OnlyDefined()


def before_hooks(function: type[torch.autograd.Function], check: Callable[[Any], None]) -> None:
    """`check(output)` runs before the first hook is put on an output of the Function; it may raise.

    The hooks are called with gradients only.
    """
    cls: Any = function._backward_cls
    register = cls._register_hook_dict

    def checked(self: Any, tensor: Any) -> None:
        check(tensor)
        only_defined(tensor)
        register(self, tensor)

    cls._register_hook_dict = checked
