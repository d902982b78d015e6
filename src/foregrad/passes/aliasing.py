"""Results of a graph that have memory of their own, by their operators; copies of results that must have it.

A compiler's passes simplify `x * 1` to `x`. As a value that is right; as a result it is wrong: the caller may write to
the result, and would write to `x`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from .._torch.graphs import body_of, ends_of
from .._torch.ops import OpOverload
from ..tracing.tape.opinfo import op_info

aten = torch.ops.aten

Memory = tuple[fx.Node, int | None]
"""A node that made memory, and which of its results lives there; None where it has only one."""


def results_of(gm: fx.GraphModule) -> list[Any]:
    """The entries of a graph's output node: nodes, None, numbers."""
    results = ends_of(gm)[1]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def tensors_in(gm: fx.GraphModule) -> list[torch.Tensor]:
    """The constants of a graph."""
    paths = {str(node.target) for node in body_of(gm) if node.op == "get_attr"}
    attributes = [operator.attrgetter(path)(gm) for path in sorted(paths)]
    return [value for value in attributes if isinstance(value, torch.Tensor)]


def memory_of(node: fx.Node, inputs: Collection[fx.Node] = ()) -> Memory:
    """The memory that the value of `node` is in, or may be in: for a view the memory of its base. `inputs`: nodes that
    stand for a graph's inputs.
    """
    while True:
        source, index = node, None
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node not in inputs:
            source, index = node.args[0], node.args[1]  # one tensor of several
        if source in inputs or not isinstance(source.target, OpOverload) or not op_info(source.target).is_view:
            return source, index  # type: ignore[return-value]
        if not source.args or not isinstance(source.args[0], fx.Node):
            return source, index  # type: ignore[return-value]
        node = source.args[0]


def makes_memory(memory: Memory) -> bool:
    """Whether it is certain that an operator made this memory in the graph."""
    maker = memory[0].target
    return isinstance(maker, OpOverload) and memory[0].op == "call_function" and not op_info(maker).writes


def written_inputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs that the graph itself writes to."""
    roots: set[fx.Node] = set()
    inputs = dict.fromkeys(ends_of(gm)[0])
    for node in body_of(gm):
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            written = [node.args[i] for i in op_info(node.target).writes if i < len(node.args)]
            roots.update(memory_of(value, inputs)[0] for value in written if isinstance(value, fx.Node))
    return tuple(i for i, node in enumerate(inputs) if node in roots)
