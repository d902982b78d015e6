"""Where a function can read the tensors that it reaches by itself, in every call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ...errors import ForegradWarning
from ...frontend.program_state import ProgramState
from ...frontend.reads import Reads
from ...frontend.sources import Source
from ...graph.meta import TensorSpec
from ...graph.slots import Closure, Slot

__all__ = ["GradientSource", "TensorSources"]


class GradientSource(Source):
    """Where the gradient is that an input has in `.grad` when the call begins: at the tensor `owner`."""

    __slots__ = ("owner",)

    def __init__(self, slot: Slot, owner: torch.Tensor) -> None:
        super().__init__(slot, owner, (("attr", "grad"),))
        self.owner = owner


class TensorSources:
    """Where tensors are found that one run brings in. `where()`: the user's line; `state`: what the run can reach."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.where: Callable[[], str]
        self.state: ProgramState
        self._added: dict[int, tuple[torch.Tensor, Source]] = {}

    def add(self, real: torch.Tensor, source: Source) -> None:
        """Where a tensor is found that was come by in another way."""
        self._added[id(real)] = real, source

    def known(self, real: torch.Tensor) -> Source | None:
        """Where the function can read a tensor; None for one that was made in the call."""
        # A tensor that the function has moved to another place is looked for where it was before.
        return self._added[id(real)][1] if id(real) in self._added else self.state.source_of(real)

    def find(self, real: torch.Tensor) -> Source | None:
        """Also where a function that keeps its results gives it; None where nothing leads to it."""
        if (source := self.known(real)) is not None:
            return source
        keeper = self.state.keeper_of(real)
        if keeper is None:
            return None
        self.reads.contents(keeper, keeper.__name__)  # guarded: it gives this very tensor as long as it isn't cleared
        return self._constant(real)

    def of(self, real: torch.Tensor) -> Source:
        """`find`; what nothing leads to is the same in every call, and a warning says so."""
        source = self.find(real)
        if source is None:
            source = self._constant(real)
            warnings.warn(
                f"a tensor {TensorSpec.of(real)} used at {self.where()} can't be reached from the compiled function; "
                "this very tensor object will be used on every call, even if the program rebinds it.",
                ForegradWarning,
                stacklevel=2,
            )
        return source

    def _constant(self, real: torch.Tensor) -> Source:
        return Source(Closure(f"tensor at {self.where()}"), real, ())
