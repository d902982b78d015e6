"""Custom autograd Functions of the user's that no graph can hold: they run as eager regions, their backwards too.

What such a Function does in Python then happens as it does in eager: it hands tensors to NumPy, reads the value of a
gradient, counts its backwards or keeps what came by.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...errors import UnsupportedError, UnsupportedMutationError, UnsupportedSideEffectError
from ...frontend.classes import dict_of_class
from ...frontend.code import names_of
from ...frontend.libraries import is_of_library
from ...frontend.reads import Reads
from ...graph.eager_regions import differentiated_twice
from ..tape.again import CaptureAgain
from .backward_reads import holds_state, reads_state

__all__ = ["BackwardChangesError", "CustomFunctions", "codes_on_the_way"]


class BackwardChangesError(UnsupportedSideEffectError):
    """The backward of a run changes Python's state."""


class CustomFunctions:
    """The custom Functions that a run applies. `regions`: eager regions, for each run of the capture; `may_run`:
    whether there may be any. `knows(object)`: it is older than the call.
    """

    def __init__(self, regions: set[Any], reads: Reads, knows: Callable[[Any], bool], *, may_run: bool) -> None:
        self.regions, self.reads, self.knows, self.may_run = regions, reads, knows, may_run
        self._applied: dict[Any, None] = {}

    def is_region(self, cls: Any) -> bool:
        """Whether a Function that is applied is to run as an eager region."""
        if not is_of_library(cls):
            if cls not in self._applied and self.may_run and cls not in differentiated_twice:
                backward = getattr(cls, "backward", None)
                if cls not in self.regions and torch.is_grad_enabled() and reads_state(backward, self.knows):
                    self.regions.add(cls)
                    raise CaptureAgain  # what it looks at is not looked at before
            if cls not in self._applied:
                place = self.reads.place(dict_of_class(cls), "dict", cls.__name__, "attr")
                for name in vars(cls).keys() & {"forward", "setup_context", "backward", "vjp"}:
                    self.reads.add(place, name, vars(cls)[name])
            self._applied[cls] = None
        return cls in self.regions

    def applied(self, cls: Any, context: dict[str, Any]) -> None:
        """Raise where the backward reads an object of `context` that is older than the call: it may change by then."""
        if cls in self._applied and holds_state(context, getattr(cls, "backward", None), self.knows):
            raise UnsupportedSideEffectError(
                f"the context of `{cls.__name__}` holds an object that was there before, and its backward looks at it: "
                "it may be another by then. Give the Function the values that it needs."
            )

    def check_absent(self, name: str, tangents: int) -> None:
        """Raise where a Function's backward is told which results have no gradient, and a caller may leave some out."""
        for cls in self._applied if tangents > 1 else ():
            codes = [getattr(getattr(cls, part, None), "__code__", None) for part in ("forward", "setup_context")]
            asks = any("set_materialize_grads" in names_of(code).others for code in codes if code is not None)
            backward = _backward(cls)
            if asks and cls not in self.regions and backward is not None and backward.co_argcount != 2:
                raise UnsupportedError(
                    f"`{name}` applies `{cls.__name__}`, whose backward is told which of its results have no gradient "
                    f"(`set_materialize_grads(False)`), and gives {tangents} results that a gradient may come to or "
                    "not. Compute one result of them, such as a loss, in the function."
                )

    def on_numpy(self, cls: Any) -> None:
        """One hands tensors to NumPy: it runs as an eager region from now on."""
        if cls not in differentiated_twice:
            self.regions.add(cls)
            raise CaptureAgain

    def isolate(self, error: BaseException) -> bool:
        """Whether the backwards of some are refused for `error`, and run as they are from now on: another run is to be
        made.
        """
        # A region has aliases of its arguments: sizes and memory that its backward gives them are not the user's.
        if not (self.may_run and isinstance(error, UnsupportedError)) or isinstance(error, UnsupportedMutationError):
            return False
        refused = [*codes_on_the_way(error)]
        is_any = isinstance(error, BackwardChangesError)  # of which it is not known
        found = {cls for cls in self._applied if is_any or _backward(cls) in refused}
        found.difference_update(differentiated_twice)
        is_news = not found <= self.regions
        self.regions |= found
        return is_news


def _backward(cls: Any) -> Any:
    return getattr(getattr(cls, "backward", None), "__code__", None)


def codes_on_the_way(error: BaseException) -> Iterator[types.CodeType]:
    """The code that an exception came through."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next
