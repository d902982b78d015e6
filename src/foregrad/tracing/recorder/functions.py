"""Torch functions that read numbers straight out of a tensor's memory, in C++, before any operator is called.

A fake tensor has no memory to read. Here such a function is called with the numbers instead, read one by one, which
the recorder sees and makes decisions of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..._torch.patches import numbers_in
from .from_lists import MAKERS
from .packed import PACKERS

__all__ = ["READERS"]


def _tensor_split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = "tensor_indices_or_sections"
    where = kwargs.get(name, args[1] if len(args) > 1 else None)
    if not isinstance(where, torch.Tensor):
        return func(*args, **kwargs)
    rest = {key: value for key, value in kwargs.items() if key != name}
    return func(args[0], where.tolist(), *args[1 if name in kwargs else 2 :], **rest)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Loss by loss, then reduced as the kernel does it: that makes a tensor of the lengths in its own memory."""
    how = reduction if isinstance(reduction, int) else {"none": 0, "mean": 1, "sum": 2}[reduction]
    inputs, given = _numbers(input_lengths), _numbers(target_lengths)
    losses = torch.ctc_loss(log_probs, targets, inputs, given, blank, 0, zero_infinity)
    if how == 1:
        lengths = torch.tensor(given, dtype=losses.dtype, device=losses.device).clamp_min(1)
        return (losses / lengths).mean()
    return losses.sum() if how == 2 else losses


def _numbers(lengths: Any) -> list[int]:
    if isinstance(lengths, torch.Tensor):
        return [lengths.item()] if lengths.dim() == 0 else lengths.tolist()  # type: ignore[list-item]
    return list(lengths)


def _torch_ctc_loss(func: Any, args: Any, kwargs: Any) -> Any:
    # A reduction left out means the mean here too.
    return _ctc_loss(*args, **kwargs)


def _tolist(func: Any, args: Any, kwargs: Any) -> Any:
    return numbers_in(args[0])


READERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.Tensor.tolist: _tolist,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
    torch.ctc_loss: _torch_ctc_loss,
    functional.ctc_loss: _torch_ctc_loss,
    **MAKERS,
    **PACKERS,
}
