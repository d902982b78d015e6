"""NumPy's arrays and scalars, where NumPy is loaded; and tensors over the memory of arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_from_numpy: Callable[[object], torch.Tensor] = torch.from_numpy  # as it is outside of captures


def is_number_of_numpy(value: Any) -> bool:
    """Whether a value is a NumPy scalar: immutable, and compared by value."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.generic) and not value.dtype.hasobject


def is_array(value: object) -> bool:
    """Whether a value is a NumPy array, of no subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def tensor_over(value: Any) -> torch.Tensor | None:
    """The tensor over the memory of an array; None for anything else, and for an array that no tensor can be over."""
    if not is_array(value) or value.dtype.kind not in "biufc":
        return None
    if not value.flags.writeable:  # PyTorch warns of such arrays
        return None
    try:
        return _from_numpy(value)
    except (TypeError, ValueError):  # the order of bytes, negative strides, numbers of 80 bits
        return None


class ArrayStandIn:
    """Base of stand-ins for arrays during a capture: `tensor()` gives the array's tensor."""

    __slots__ = ()
    tensor: Callable[[], torch.Tensor]
