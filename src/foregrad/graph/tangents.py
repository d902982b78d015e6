"""What is known of a tangent before it comes: a derivative is compiled for each pattern of these."""

from __future__ import annotations

import dataclasses
from typing import Any

from .meta import TensorSpec

__all__ = ["ABSENT", "CONSTANT", "STOP", "VARIABLE", "TangentKind", "place_of_size"]

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


def place_of_size(size: int, dim: int, shape: tuple[int, ...]) -> int | None:
    """Which size of a tensor the `size` in dimension `dim` of a plain tensor in it is; None for another number."""
    if dim < len(shape) and shape[dim] == size:
        return dim
    return shape.index(size) if size in shape else None
