"""Donated inputs: inputs of a backward that it may overwrite, since the forward made them for it alone.

A compiler that knows them writes gradients over activations that are not read again, in place of fresh memory. The
analysis holds for the usual call. Whether it holds in a given call (the graph may be kept, a hook may keep a tensor) is
checked before each: `runtime.donated`.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from ..graph.meta import TensorSpec, spec_of
from ..graph.partitioned import Partitioned
from .aliasing import memory_of, results_of
from .sparse import dense_results

__all__ = ["donated_inputs"]


def donated_inputs(partitioned: Partitioned) -> tuple[int, ...]:
    """Positions of the backward's inputs that share memory with no input, output, gradient or other saved value."""
    saved = {node.name: node for node in partitioned.saved_nodes}
    shared = Counter(memory_of(node) for node in results_of(partitioned.forward) if isinstance(node, fx.Node))
    returned = {memory_of(node)[0] for node in dense_results(partitioned.backward) if isinstance(node, fx.Node)}
    positions = []
    for i, node in enumerate(n for n in partitioned.backward.graph.nodes if n.op == "placeholder"):
        source = saved.get(node.name)
        if source is None or node in returned:
            continue  # a tangent; a gradient
        memory = memory_of(source)
        if memory[0].op == "call_function" and shared[memory] == 1 and _is_written_once(node, is_view=_is_view(source)):
            positions.append(i)
    return tuple(positions)


def _is_written_once(node: fx.Node, *, is_view: bool) -> bool:
    """Whether each element of a tensor has memory of its own; False for views with symbolic sizes."""
    spec = spec_of(node)
    if not isinstance(spec, TensorSpec):
        return False
    return not spec.overlaps_itself if spec.is_static else not is_view


def _is_view(node: fx.Node) -> bool:
    maker, index = memory_of(node)
    return node != maker and (index is None or node.args[:2] != (maker, index))
