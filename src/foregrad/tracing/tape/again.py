"""Why a capture starts over: it found out what it should have known from the beginning."""

from __future__ import annotations

from typing import Any

import torch


class CaptureAgain(BaseException):
    """Raised to start capture over, knowing more. No error, and nothing for the user's code to catch."""


class NumberVaries(CaptureAgain):
    """Raised to start capture over: the numbers that the line `where` reads from tensors become symbolic."""

    def __init__(self, where: str) -> None:
        super().__init__(f"the number read at {where} is of a tensor that the call has changed")
        self.where = where


class SharedClosureFound(CaptureAgain):
    """Raised to start capture over with more tensors lifted from the beginning. `found`: pairs (tensor, source)."""

    def __init__(self, *found: tuple[torch.Tensor, Any]) -> None:
        super().__init__("a closed-over tensor is an input, or shares memory with one")
        self.found = found
