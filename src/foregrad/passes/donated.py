"""Which inputs of a backward it may overwrite: what the forward made for it alone.

A compiler that knows them writes gradients over activations that are not read again, in place of fresh memory. What is
found here holds for the usual call; whether it does in this one (the graph may be kept, a hook may keep a tensor) is
looked at before each: `runtime.donated`.
"""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx

from .._torch.codegen import OpOverload
from ..graph.meta import TensorSpec, spec_of
from ..graph.partitioned import Partitioned
from ..tracing.opinfo import op_info

__all__ = ["donated_inputs"]


def donated_inputs(partitioned: Partitioned) -> tuple[int, ...]:
    """Positions of the backward's inputs that share memory with no input, output, gradient or other saved value."""
    saved = {node.name: node for node in partitioned.saved_nodes}
    shared = Counter(_memory_of(node) for node in _results(partitioned.forward))
    returned = {_memory_of(node) for node in _results(partitioned.backward)}
    found = []
    for i, node in enumerate(n for n in partitioned.backward.graph.nodes if n.op == "placeholder"):
        source = saved.get(node.name)
        if source is None or node in returned:
            continue  # a tangent; a gradient
        memory = _memory_of(source)
        if memory.op == "call_function" and shared[memory] == 1 and _is_written_once(node, is_view=memory != source):
            found.append(i)
    return tuple(found)


def _results(module: fx.GraphModule) -> list[fx.Node]:
    outputs = next(iter(reversed(module.graph.nodes))).args[0]
    return [node for node in outputs if isinstance(node, fx.Node)]


def _is_written_once(node: fx.Node, *, is_view: bool) -> bool:
    """Whether each element of a tensor has memory of its own; of views with symbolic sizes it isn't asked."""
    spec = spec_of(node)
    if not isinstance(spec, TensorSpec):
        return False
    return not spec.overlaps_itself if spec.is_static else not is_view


def _memory_of(node: fx.Node) -> fx.Node:
    """The node that made the memory which the value of `node` is, or may be, a view of."""
    while True:
        source = node
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = node.args[0]  # one tensor of several
        if not isinstance(source.target, OpOverload) or not op_info(source.target).is_view:
            return node
        if not source.args or not isinstance(source.args[0], fx.Node):
            return node
        node = source.args[0]
