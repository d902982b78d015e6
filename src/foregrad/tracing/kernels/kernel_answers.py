"""Answers of kernels themselves, which are asked on zeros laid out like the fakes: strides, and errors.

Strides of dimensions of size 1, and of tensors without elements, mean nothing. Programs can see them, and kernels
choose them as it comes; FakeTensor's Python decompositions often choose others. Where an argument is not contiguous
and a result has such dimensions, the kernel is asked.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..._torch.nested import tensors_in
from ...graph.meta import TensorSpec, contiguous_strides
from ..heap.overlaps import ask_kernel, is_symbolic_tensor

_LIMIT_BYTES = 1 << 16
_OPAQUE = {"workspace", "reserve", "reserve_space", "reserveSpace", "packed_weights"}


def as_kernels_have_it(recipe: Any, op: Any, given: list[TensorSpec], args: Any, kwargs: Any) -> Any:
    """`recipe`, what FakeTensor says of the results of `op`, with the strides that the kernel gives them."""
    results = recipe if isinstance(recipe, (list, tuple)) else [recipe]
    if not any(type(r) is TensorSpec and _is_doubtful(r) for r in results):
        return recipe
    if takes_opaque(op) or kwargs.get("generator") is not None:
        return recipe
    if all(s.stride == contiguous_strides(s.shape) for s in given) or any(s.device.type != "cpu" for s in given):
        return recipe
    if sum(s.nbytes for s in (*given, *(r for r in results if type(r) is TensorSpec))) > _LIMIT_BYTES:
        return recipe
    try:
        out = ask_kernel(op, args, kwargs)
    except Exception:
        return recipe  # zeros don't suit it
    if out is NotImplemented:
        return recipe
    if type(recipe) is TensorSpec:
        return _like(recipe, out)
    return type(recipe)(map(_like, recipe, out))


@functools.cache
def takes_opaque(op: Any) -> bool:
    """Whether an argument is memory of a kernel library's own, which it trusts: of zeros it makes a crash."""
    return any(argument.name in _OPAQUE for argument in op._schema.arguments)


def _is_doubtful(spec: TensorSpec) -> bool:
    return 1 in spec.shape or 0 in spec.shape


def _like(spec: Any, tensor: Any) -> Any:
    if type(spec) is not TensorSpec or not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != spec.shape:
        return spec
    return TensorSpec(spec.shape, tensor.stride(), spec.dtype, spec.device, spec.offset, spec.conj, spec.neg)


# -------------------------------------------------------------------- errors
# What kernels say of arguments that they don't take: FakeTensor raises other errors, with other words.


_PLAIN = {RuntimeError, IndexError, ValueError, TypeError, OverflowError, AssertionError}


def as_kernels_say(op: Any, args: Any, kwargs: Any, error: Exception) -> Exception:
    """The error of the kernel where it has one, else `error`, which FakeTensor raised."""
    tensors = tensors_in((args, kwargs))
    foreign = any(is_symbolic_tensor(t) or t.device.type != "cpu" or t.layout is not torch.strided for t in tensors)
    if type(error) not in _PLAIN or foreign or takes_opaque(op):
        return error
    try:
        ask_kernel(op, args, kwargs)
    except Exception as said:
        return said.with_traceback(None)
    return error
