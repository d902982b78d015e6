"""Kinds of tangents: a derivative is compiled for each pattern."""

from __future__ import annotations

import dataclasses
from typing import Any

from .meta import TensorSpec

ABSENT, CONSTANT, VARIABLE = 0, 1, 2  # missing; present without requiring grad; requires grad
STOP = 3  # missing: the gradient from other outputs to this interior output is asked for, and stops there


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TangentKind:
    """A tangent that differs in kind from capture's; a backward of its own is compiled.

    `outputs`: the positions of its outputs: a plain tensor, or the plain tensors of a wrapper subclass, without further
    tangents. `shape`: the shape of the first such tangent. `spec`: the spec of a wrapper subclass, None for a plain
    tensor. `parts`: its plain tensors, as tangents behind all outputs' tangents. `layouts`: the layout of the parts,
    common to all tangents of this kind.
    """

    outputs: tuple[int, ...]
    shape: tuple[int, ...]
    spec: Any
    parts: tuple[TensorSpec, ...]
    layouts: Any


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardCase:
    """The case that a backward is compiled for: tangents of `pattern`, followed by the parts of other `kinds`.

    `needs_input_grad`: the inputs that get a gradient (None: all). `create_graph`: the backward has a backward itself.
    `gone`: positions of residuals that were freed since.
    """

    pattern: tuple[int, ...]
    needs_input_grad: frozenset[int] | None = None
    create_graph: bool = True
    gone: frozenset[int] = frozenset()
    kinds: tuple[TangentKind, ...] = ()

    @property
    def present(self) -> tuple[bool, ...]:
        """A mask of the outputs that get a cotangent."""
        others = {i for kind in self.kinds for i in kind.outputs}
        count = len(self.pattern) - sum(len(kind.parts) for kind in self.kinds)
        return tuple(tangent in (CONSTANT, VARIABLE) or i in others for i, tangent in enumerate(self.pattern[:count]))


def place_of_size(size: object, dim: int, shape: tuple[int, ...]) -> int | None:
    """The dimension of a tensor that has the `size` in dimension `dim` of its plain tensor; None if none has."""
    if dim < len(shape) and shape[dim] == size:
        return dim
    return shape.index(size) if size in shape else None
