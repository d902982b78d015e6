"""The backward for the case that only some of its gradients are needed, as for `autograd.grad(y, x)`.

Eager computes no others; neither does this.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from .._torch.graphs import GraphCopier
from .._torch.modules import make_graph_module
from .._torch.replay import replayed

__all__ = ["only_gradients"]


def only_gradients(backward: fx.GraphModule, positions: Collection[int]) -> fx.GraphModule:
    """`backward` cut down to the gradients at `positions`; all other gradients become None."""
    output = next(iter(reversed(backward.graph.nodes)))
    kept = [gradient if i in positions else None for i, gradient in enumerate(output.args[0])]
    needed = set()
    stack = [gradient for gradient in kept if gradient is not None]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in backward.graph.nodes:
        if replayed(node) in needed:
            needed.update((node, *node.all_input_nodes))
    copier = GraphCopier()
    for node in backward.graph.nodes:
        if node.op == "placeholder":
            copier.placeholder(node)
        elif node in needed:
            copier.copy(node)
    copier.output(kept)
    return make_graph_module(backward, copier.graph, "PartialBackward")
