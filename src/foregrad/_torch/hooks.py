"""Hooks on the outputs of compiled functions. Checked on torch 2.13.0.

A node of several outputs runs when a gradient comes in for one of them, and autograd calls the hooks of all. In eager
each output has operators of its own, whose hooks are not called where nothing comes in. Neither are those of a leaf
that nothing arrives at.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["before_hooks", "only_defined", "spare_leaves"]


class _OnlyDefined(collections.OrderedDict[Any, Any]):
    """The hooks of a tensor, none of which is called with None."""

    def __setitem__(self, key: Any, hook: Any) -> None:
        super().__setitem__(key, _spared(hook))


class _UnlessNone(functools.partial[Any]):
    """A hook that is not called with None."""

    def __call__(self, gradient: Any) -> Any:
        return None if gradient is None else self.func(gradient)


def _spared(hook: Any) -> Any:
    # Those of several tensors count their calls, and expect one for each tensor whose node runs.
    counts = getattr(hook, "__module__", "") == torch.autograd.graph.__name__
    return hook if counts or isinstance(hook, _UnlessNone) else _UnlessNone(hook)


def spare_leaves(node: Any, gradients: Sequence[Any]) -> None:
    """Before `node` returns these gradients: hooks of leaves that it has none for are not called with None."""
    for (following, _), gradient in zip(node.next_functions, gradients, strict=True):
        leaf = None if gradient is not None else getattr(following, "variable", None)
        hooks: Any = getattr(leaf, "_backward_hooks", None) or {}
        for key, hook in hooks.items():
            hooks[key] = _spared(hook)


def only_defined(tensor: Any) -> None:
    """Before the first hook of a result is registered: none is to be called with None."""
    tensor._backward_hooks = _OnlyDefined()


def before_hooks(function: type[torch.autograd.Function], check: Callable[[int], None]) -> None:
    """`check(number)` runs before the first hook is put on output `number` of the Function; it may raise.

    The hooks are called with gradients only.
    """
    cls: Any = function._backward_cls
    register = cls._register_hook_dict

    def checked(self: Any, tensor: Any) -> None:
        try:
            check(tensor.output_nr)
        except Exception:
            tensor._backward_hooks = None  # as it was
            raise
        only_defined(tensor)
        register(self, tensor)

    cls._register_hook_dict = checked
