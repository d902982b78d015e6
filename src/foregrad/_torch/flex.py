"""PyTorch's `flex_attention` and its backward, as graphs call them. Checked on torch 2.13.0.

The operators take functions of single scores (`score_mod`, `mask_mod`) as graphs of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .fakes import FakeTensorMode, NewFakeMode

ATTENTION: Any = torch.ops.higher_order.flex_attention
BACKWARD: Any = torch.ops.higher_order.flex_attention_backward

_OPTIONS = {ATTENTION: 6, BACKWARD: 11}  # the position of the kernel's options among the arguments
# Compilers run operators under a fake mode, whose rules are looked up by its class.
for _operator in (ATTENTION, BACKWARD):
    _operator.python_key_table.setdefault(NewFakeMode, _operator.python_key_table[FakeTensorMode])

# Positions among the backward's arguments.
_JOINT, _BUFFERS = 8, 12
_SCALARS = 5  # gradients that the joint graph returns before the gradients of the buffers


def indexed_by_tensors() -> Any:
    """Context: `tensor[i]` with a tensor `i` of one element is an operator, as it is in functions of single scores."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def strides_like(shape: Sequence[Any], strides: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a result, or of a gradient, of this shape in the layout of a query, key or value: dense, with the
    dimensions in the same order, except that the last is innermost.
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
    """The backward. PyTorch gives gradients to buffers that require grad; here the joint graph tells which do."""
    joint = args[_JOINT]
    results = next(iter(reversed(joint.graph.nodes))).args[0]
    buffers = tuple(
        value.detach().requires_grad_() if isinstance(gradient, fx.Node) else value
        for value, gradient in zip(args[_BUFFERS], results[_SCALARS:], strict=True)
    )
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        return BACKWARD(*args[:_BUFFERS], buffers, *args[_BUFFERS + 1 :])


def has_kernel(node: fx.Node) -> bool:
    """Whether Inductor has a kernel for this call: always on accelerators; on the CPU, for the output alone."""
    if node.target not in IN_GRAPHS:
        return False
    arguments: Any = node.args
    options = arguments[_OPTIONS[node.target]]
    if "OUTPUT_LOGSUMEXP" not in options:  # the bare operator, without the options that `flex_attention` adds
        return False
    if arguments[0].meta["val"].device.type != "cpu":
        return True
    if node.target is BACKWARD or options["OUTPUT_LOGSUMEXP"] or not torch.cpu._is_avx2_supported():
        return False
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


IN_GRAPHS: dict[Any, Callable[..., Any]] = {ATTENTION: _attention, BACKWARD: _backward}
"""What runs them on real tensors, as plain operators."""
