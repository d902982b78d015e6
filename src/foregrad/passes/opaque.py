"""Questions of passes about values in graphs that no `TensorSpec` describes. The annex that records them answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from ..annexes import given
from .aliasing import results_of


@dataclasses.dataclass(frozen=True, slots=True)
class OpaqueValues:
    """The answers; by default a graph has no opaque value.

    `nodes`: nodes with an opaque value. `around`: the module, with a pass applied to its other part. `plain_results`:
    a graph's results, opaque tensors by their parts. `as_they_come`: a backward's tangents that may have any layout.
    """

    nodes: Callable[[fx.Graph], set[fx.Node]] = lambda graph: set()
    around: Callable[[fx.GraphModule, Callable[[fx.GraphModule], fx.GraphModule]], fx.GraphModule] = (
        lambda module, prepare: prepare(module)
    )
    plain_results: Callable[[fx.GraphModule], list[object]] = results_of
    as_they_come: Callable[[fx.GraphModule], frozenset[int]] = lambda backward: frozenset()


def opaque_values() -> OpaqueValues:
    """The annex's answers."""
    found: OpaqueValues = next(iter(given("values without a layout")), _NONE)
    return found


_NONE = OpaqueValues()
