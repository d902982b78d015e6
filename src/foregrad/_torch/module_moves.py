"""`module.to(device)`, `.float()`, `.cpu()` inside a capture, if they change no tensor of the module.

PyTorch then assigns each parameter to itself (`param.data = param`). For fake tensors it would replace the parameters.
Checked on torch 2.11.0, 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install", "remove"]

_original: Callable[..., torch.nn.Module] = torch.nn.Module._apply
_is_capturing: Callable[[], bool]
_swapped: Callable[[Any], Any]


def _apply(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    if _is_capturing():
        held = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            applied = [(fn(tensor), tensor) for tensor in held]
            if all(after is tensor or after is _swapped(tensor) for after, tensor in applied):
                return self
    return _original(self, fn, recurse)


def install(is_capturing: Callable[[], bool], swapped: Callable[[Any], Any]) -> None:
    """Install the patch; `swapped(tensor)` is the stand-in of a tensor in this thread's capture."""
    global _is_capturing, _swapped
    _is_capturing, _swapped = is_capturing, swapped
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def remove() -> None:
    torch.nn.Module._apply = _original  # type: ignore[method-assign]
