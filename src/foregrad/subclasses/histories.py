"""Autograd histories of wrappers that a compiled function writes to, and of its interior outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import engine
from .._torch.dynamo_off import dynamo_off
from .._torch.tensors import is_view
from .conversion import layouts_of, taken_by, taken_gradient
from .spec import WrapperSpec

__all__ = ["give_history", "giving_history"]


class _History(torch.autograd.Function):
    """An in-place operator to autograd; the plain tensors in the wrapper were written before."""

    @staticmethod
    def forward(ctx: Any, wrapper: Any, take: Callable[[Any], Sequence[Any] | None], *parts: torch.Tensor) -> Any:
        ctx.mark_dirty(wrapper)
        ctx.set_materialize_grads(False)
        ctx.take, ctx.of_view, ctx.layouts = take, is_view(wrapper), layouts_of(parts)
        return wrapper

    @staticmethod
    @dynamo_off()  # which would look into what the class of a wrapper does
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        # The base of a view needs a gradient where the view was written; the old elements need none.
        before = torch.zeros_like(gradient) if ctx.of_view else None
        return before, None, *taken_by(ctx.take, gradient, ctx.layouts, ctx.next_functions[1:])


_history = engine.direct_apply(_History)


def giving_history(spec: WrapperSpec) -> Callable[..., None]:
    """A function for rendered code: `give(wrapper, *parts)` gives a wrapper the history of plain tensors, which have
    its elements. `spec`: the wrapper's spec after the write. Its version counter moves once.
    """
    places = spec.carrying()

    def take(gradient: Any) -> list[Any] | None:
        taken = taken_gradient(spec, gradient)
        return None if taken is None else [taken[place] for place in places]

    return functools.partial(give_history, take)


def give_history(take: Callable[[Any], Sequence[Any] | None], wrapper: Any, *parts: torch.Tensor) -> None:
    """Give a wrapper the history of these tensors; `take` computes their gradients from the wrapper's gradient."""
    with torch.enable_grad():
        _history(wrapper, take, *parts)
