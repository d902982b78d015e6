"""Wrapper subclasses: tensors that PyTorch's protocol takes apart into the tensors inside.

`__tensor_flatten__` of a traceable wrapper subclass names the attributes with its inner tensors; these may be wrappers
themselves. The tensors at the leaves are its plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .stand_ins import is_stand_in
from .tensors import is_traceable_wrapper_subclass

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor that can be taken apart."""
    return isinstance(value, torch.Tensor) and type(value) not in _PLAIN and is_traceable_wrapper_subclass(value)


def parts_of(wrapper: Any) -> list[torch.Tensor]:
    """The plain tensors inside, in order."""
    tensors: list[torch.Tensor] = []
    for name in wrapper.__tensor_flatten__()[0]:
        part = getattr(wrapper, name)
        if isinstance(part, torch.Tensor):
            tensors += parts_of(part) if is_wrapper(part) else [part]
    return tensors


def is_of_capture(value: object) -> bool:
    """Whether a tensor is a fake, or a wrapper around fakes only."""
    if is_stand_in(value):
        return True
    return is_wrapper(value) and all(is_stand_in(part) for part in parts_of(value))


def holds_tensors(types: Sequence[type]) -> bool:
    """Whether an argument's class is a wrapper's, one that implements operators itself."""
    return any(hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__") for cls in types)
