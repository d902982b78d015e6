"""Where a function can read the tensors that it reaches by itself, in every call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ...errors import ForegradWarning
from ...frontend.call import FlatCall
from ...frontend.reads import Reads
from ...frontend.sources import Source, find_sources
from ...frontend.user_state import UserState
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

    def __init__(self, call: FlatCall, reads: Reads) -> None:
        self.call, self.reads = call, reads
        self.where: Callable[[], str]
        self.state: UserState
        self._found: dict[int, Source] | None = None
        self._kept: list[torch.Tensor] = []  # so that ids stay theirs

    def all(self) -> dict[int, Source]:
        """By id of a tensor: what the function, and modules among its arguments, hold."""
        if self._found is None:
            named = zip(self.call.paths, self.call.leaves, strict=True)
            modules = tuple((path, leaf) for path, leaf in named if isinstance(leaf, torch.nn.Module))
            self._found = find_sources(self.call.function, modules)
        return self._found

    def add(self, real: torch.Tensor, source: Source) -> None:
        """Where a tensor is found that was come by in another way."""
        self.all()[id(real)] = source
        self._kept.append(real)

    def known(self, real: torch.Tensor) -> Source | None:
        """Where the function can read a tensor; None for one that was made in the call."""
        # A tensor that the function has moved to another place is looked for where it was before.
        return self.all().get(id(real)) or self.state.source_of(real) or self.reads.source_of(real)

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
