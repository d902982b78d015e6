"""What kernels say of arguments that they don't take: FakeTensor raises other errors, with other words.

The kernel is asked, on zeros laid out like the fakes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..heap.overlaps import ask_kernel, is_symbolic_tensor, tensors_in
from ..heap.strides import takes_opaque

__all__ = ["as_kernels_say"]

_PLAIN = {RuntimeError, IndexError, ValueError, TypeError, OverflowError, AssertionError}


def as_kernels_say(op: Any, args: Any, kwargs: Any, error: Exception) -> Exception:
    """The error of the kernel where it has one, else `error`, which FakeTensor raised."""
    tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
    foreign = any(is_symbolic_tensor(t) or t.device.type != "cpu" or t.layout is not torch.strided for t in tensors)
    if type(error) not in _PLAIN or foreign or takes_opaque(op):
        return error
    try:
        ask_kernel(op, args, kwargs)
    except Exception as said:
        return said.with_traceback(None)
    return error
