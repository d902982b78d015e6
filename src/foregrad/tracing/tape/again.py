"""Exceptions that ask for another run: a capture found a fact that it should have known from the beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import EscapedTensorError, UnsupportedSideEffectError

if TYPE_CHECKING:
    from ...frontend.call import LeadingPlace


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
        super().__init__("a closed-over tensor is an input, or shares memory with an input")
        self.found = found


class AdditionsFound(CaptureAgain):
    """Raised to start capture over: the call adds to containers among its arguments. `found`: by path and class,
    whether it reads them too.
    """

    def __init__(self, found: dict[tuple[str, type], bool]) -> None:
        super().__init__("a container among the arguments is added to")
        self.found = found


class ArgumentsFound(UnsupportedSideEffectError):  # noqa: N818 - asks for another capture, with these as arguments
    """The function takes values from places that give others in each call: these are to be its arguments."""

    def __init__(self, name: str, path: str, taken: tuple[LeadingPlace, ...]) -> None:
        super().__init__(
            f"`{name}` draws from {path}; a graph would replay one value. Draw before the call, and pass the "
            "result (for random numbers, torch's own functions work)."
        )
        self.name, self.path, self.taken = name, path, taken

    def fits(self, places: tuple[LeadingPlace, ...]) -> bool:
        """Whether a call that takes these values takes what was found."""
        return False

    def refusal(self, places: tuple[LeadingPlace, ...] = ()) -> UnsupportedSideEffectError:
        """The error for a call that can't have these values as arguments. `places`: of a form that does not fit."""
        return UnsupportedSideEffectError(self.reason(places))

    def reason(self, places: tuple[LeadingPlace, ...]) -> str:
        return f"`{self.name}` reads {self.path}, and adds to the container. Read it outside, and pass the result."


class ArgumentsDiffer(UnsupportedSideEffectError):  # noqa: N818 - the call is captured in another way
    """A call takes other values than those that are its arguments, or needs the numbers in an array that is one."""


class GivenOnce(EscapedTensorError):  # noqa: N818 - the call runs eagerly, and later calls are captured
    """The program catches or records a warning that PyTorch gives once in a process."""


class BackwardChangesError(UnsupportedSideEffectError):
    """The backward of a run changes Python's state."""
