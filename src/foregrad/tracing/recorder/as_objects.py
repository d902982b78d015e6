"""A tensor as a Python object: its text, its pickle, copies of it.

Text and pickles hold values, which no graph has: a call that asks for them is no call to compile. Copies are tensors:
`copy.copy` shares the memory, `copy.deepcopy` does not; neither has a history.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ...errors import TensorTextError, UnsupportedAliasError
from ...graph.meta import TensorSpec

_TENSOR: Any = torch.Tensor


class ValuesAsked:
    """Whether a function asked for values as text, whoever has caught the error."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self.failed: TensorTextError | None = None

    def refuse(self, what: str, tensor: Any) -> None:
        kind = "a tensor" if not is_stand_in(tensor) else f"a tensor {TensorSpec.of(tensor)}"
        self.failed = TensorTextError(
            f"the {what} of {kind} is asked for at {self.where()}: it holds values, which a compiled call has nowhere "
            "but in its graph. Print, log or save what the function returns."
        )
        raise self.failed

    def raise_failed(self) -> None:
        if self.failed is not None:
            raise self.failed


def _text(asked: ValuesAsked, tensor: Any, *_: Any, **__: Any) -> Any:
    asked.refuse("text", tensor)


def _reduced(asked: ValuesAsked, tensor: Any, *_: Any, **__: Any) -> Any:
    """For `copy.copy`, a function that gives the copy; anybody else stores what is in the tensor."""
    if not is_stand_in(tensor) or not _is_called_by(copy.copy.__code__):
        asked.refuse("pickle", tensor)
    return _copied, (tensor,)


def _is_called_by(code: types.CodeType) -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "foregrad"):
        frame = frame.f_back
    return frame.f_code is code


def _copied(tensor: Any) -> Any:
    shared = tensor.data
    return _as_plain(tensor, shared, dict(tensor.__dict__))


def _deep_copy(asked: ValuesAsked, tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    spec = TensorSpec.of(tensor)
    is_whole = spec.is_dense and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    if not is_whole or tensor.grad is not None:
        raise UnsupportedAliasError(
            f"copy.deepcopy at {asked.where()} of a tensor {spec} copies memory around it, or its "
            "`.grad`: use `.detach().clone()`."
        )
    with torch.no_grad():
        new = tensor.detach().clone()
    new = memo[id(tensor)] = _as_plain(tensor, new, copy.deepcopy(dict(tensor.__dict__), memo))
    return new


def _as_plain(tensor: Any, new: Any, attributes: dict[str, Any]) -> Any:
    """What shares `new`'s memory as a tensor of the same class, marks and attributes."""
    if type(tensor) is torch.nn.Parameter:
        new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        new.requires_grad_()
    new.__dict__.update(attributes)
    return new


# What is done with the arguments of these, stand-ins by then, in place of calling them.
OBJECTS: dict[Any, Callable[..., Any]] = {
    _TENSOR.__repr__: _text,
    _TENSOR.__format__: _text,
    _TENSOR.__reduce_ex__: _reduced,
    torch.nn.Parameter.__reduce_ex__: _reduced,
    _TENSOR.__deepcopy__: _deep_copy,
    torch.nn.Parameter.__deepcopy__: _deep_copy,
}
