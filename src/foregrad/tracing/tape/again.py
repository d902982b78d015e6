"""Why a capture starts over: it found out what it should have known from the beginning."""

from __future__ import annotations

import torch

from ...frontend.sources import Source

__all__ = ["CaptureAgain", "SharedClosureFound"]


class CaptureAgain(BaseException):
    """Raised to start capture over, knowing more. No error, and nothing for the user's code to catch."""


class SharedClosureFound(CaptureAgain):
    """Raised to start capture over with one more tensor lifted from the beginning."""

    def __init__(self, tensor: torch.Tensor, source: Source | None) -> None:
        super().__init__("closed-over tensor shares memory with an input")
        self.tensor = tensor
        self.source = source
