"""PyTorch's `flex_attention` and its backward, as graphs call them. Checked on torch 2.13.0.

The operators take functions of single scores (`score_mod`, `mask_mod`), which are graphs of their own by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["ATTENTION", "BACKWARD", "IN_GRAPHS", "indexed_by_tensors", "strides_like"]

ATTENTION: Any = torch.ops.higher_order.flex_attention
BACKWARD: Any = torch.ops.higher_order.flex_attention_backward

# Of the backward's arguments.
_JOINT, _BUFFERS = 8, 12
_SCALARS = 5  # gradients that the joint graph gives before those of the buffers


def indexed_by_tensors() -> Any:
    """Context: `tensor[i]` with a tensor `i` of one element is an operator, as it is in functions of single scores."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def strides_like(shape: Sequence[Any], strides: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a result of this shape, or of a gradient, that is laid out like a query, key or value: dense, the
    dimensions in the same order, but for the last one, which is innermost.
    """
    order = sorted(range(len(shape)), key=lambda dim: strides[dim])
    result = _dense(shape, order)
    if result[-1] != 1:
        last = len(shape) - 1
        result = _dense(shape, [last, *(dim for dim in order if dim != last)])
    return tuple(result)


def _dense(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return strides


def _attention(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return ATTENTION(*args)


def _backward(*args: Any) -> Any:
    """PyTorch gives gradients to buffers that require them; a graph's inputs don't, but its joint graph says which."""
    joint = args[_JOINT]
    results = next(iter(reversed(joint.graph.nodes))).args[0]
    buffers = tuple(
        value.detach().requires_grad_() if isinstance(gradient, fx.Node) else value
        for value, gradient in zip(args[_BUFFERS], results[_SCALARS:], strict=True)
    )
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        return BACKWARD(*args[:_BUFFERS], buffers, *args[_BUFFERS + 1 :])


IN_GRAPHS: dict[Any, Callable[..., Any]] = {ATTENTION: _attention, BACKWARD: _backward}
"""What runs them on real tensors, as plain operators."""
