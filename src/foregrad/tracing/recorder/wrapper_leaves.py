"""Writes with gradients to wrapper subclasses that are leaves, which eager forbids.

The stand-in of a wrapper is made of those of its plain tensors, and no leaf itself: autograd would let it pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._torch.ops import OpOverload
from ..._torch.tensors import base_of, is_view
from ...subclasses.spec import is_wrapper
from ..tape.opinfo import op_info

__all__ = ["check_wrapper_leaves"]

_SAID = "a{} leaf Variable that requires grad is being used in an in-place operation."


def check_wrapper_leaves(leaves: Mapping[int, Any], func: Any, args: Any, kwargs: Any) -> None:
    """Raise eager's error where an operator writes to one of the stand-ins `leaves` (by id), or to a view of one."""
    if not (isinstance(func, OpOverload) and func._schema.is_mutable and torch.is_grad_enabled()):
        return
    info = op_info(func)
    for position in info.writes:
        value = args[position] if position < len(args) else kwargs.get(info.argument_names[position])
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not (is_wrapper(tensor) and tensor.requires_grad):
                continue
            if id(tensor) in leaves:
                raise RuntimeError(_SAID.format(""))
            if is_view(tensor) and id(base_of(tensor)) in leaves:
                raise RuntimeError(_SAID.format(" view of a"))
