"""What is known of a tangent before it comes: a derivative is compiled for each pattern of these."""

from __future__ import annotations

import dataclasses
from typing import Any

from .meta import TensorSpec

__all__ = ["ABSENT", "CONSTANT", "STOP", "VARIABLE", "BackwardCase", "TangentKind", "place_of_size"]

ABSENT, CONSTANT, VARIABLE = 0, 1, 2  # did not come in; came without requiring grad; requires grad
STOP = 3  # did not come in: what arrives at the output inside, of others, is asked for, and goes no further


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TangentKind:
    """A tangent of another kind than the backward was captured for, which is compiled for it by itself.

    `outputs`: the positions of the outputs that it is for, a plain one or the plain tensors of a wrapper subclass, at
    which no tangent comes in then. `shape`: of the first that came. `spec`: of the wrapper subclass that it is, None
    for a plain tensor. `parts`: its plain tensors, which are tangents behind the others. `layouts`: what those have in
    common in all tangents of this kind.
    """

    outputs: tuple[int, ...]
    shape: tuple[int, ...]
    spec: Any
    parts: tuple[TensorSpec, ...]
    layouts: Any


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardCase:
    """What a backward is made for, as a function: tangents of `pattern`, and behind them the parts of other `kinds`.

    It gives the gradients of the inputs in `needs_input_grad` (None: all), and has a backward itself where
    `create_graph` is True. `gone`: positions of saved values that were given up since.
    """

    pattern: tuple[int, ...]
    needs_input_grad: frozenset[int] | None = None
    create_graph: bool = True
    gone: frozenset[int] = frozenset()
    kinds: tuple[TangentKind, ...] = ()

    @property
    def present(self) -> tuple[bool, ...]:
        """The outputs for which a gradient comes in."""
        others = {i for kind in self.kinds for i in kind.outputs}
        count = len(self.pattern) - sum(len(kind.parts) for kind in self.kinds)
        return tuple(given in (CONSTANT, VARIABLE) or i in others for i, given in enumerate(self.pattern[:count]))


def place_of_size(size: int, dim: int, shape: tuple[int, ...]) -> int | None:
    """Which size of a tensor the `size` in dimension `dim` of a plain tensor in it is; None for another number."""
    if dim < len(shape) and shape[dim] == size:
        return dim
    return shape.index(size) if size in shape else None
