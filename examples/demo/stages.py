"""The stages of one compilation, made by hand for the demo's model: to print them and to count their operators."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

import foregrad
from foregrad.graph.printing import print_graph

__all__ = ["STAGES", "Sizes", "measure_sizes", "program_of"]

STAGES = ("joint", "forward", "backward", "runtime")


@dataclass(frozen=True)
class Sizes:
    """How many operators each graph of a function has, and what its forward half saves for its backward half."""

    joint: int
    forward: int
    backward: int
    saved_bytes: int


def measure_sizes(call: Callable[..., Tensor], args: tuple[Tensor, ...]) -> Sizes:
    """Capture and split `call` once more, and count."""
    joint = foregrad.capture(call, *args)
    parts = foregrad.partition(joint, "default")
    return Sizes(_count_ops(joint), _count_ops(parts.forward), _count_ops(parts.backward), parts.saved_bytes)


def program_of(stage: str, call: Callable[..., Tensor], compiled: Any, args: tuple[Any, ...]) -> str:
    """The text of one of `STAGES`: the captured graph, one of its halves, or the code that runs around them."""
    if stage == "runtime":
        compiled(*args)
        return "\n\n".join(specialization.source() for specialization in compiled.foregrad.specializations)
    joint = foregrad.capture(call, *args)
    if stage == "joint":
        return str(joint)
    half = getattr(foregrad.partition(joint, "default"), stage)
    return print_graph(half, header=f"{stage} of {joint.name}", slots=joint.slot_texts(), name=stage)


def _count_ops(stage: Any) -> int:
    """Operators in a graph, unpacking of several results aside."""
    graph: fx.Graph = stage.graph
    return sum(node.op == "call_function" and node.target is not operator.getitem for node in graph.nodes)
