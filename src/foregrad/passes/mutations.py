"""Writes to inputs as operators of the graph, for backends that do them better than the runtime.

A graph without gradients may write its new values into its inputs by itself, at its end: a compiler that fuses then
writes them once, and the runtime need not copy.
"""

from __future__ import annotations

import dataclasses

import torch

from ..graph.partitioned import Partitioned

__all__ = ["with_mutations_inside"]

aten = torch.ops.aten


def with_mutations_inside(partitioned: Partitioned) -> Partitioned:
    """Put each plain update of an input into the forward graph, as a `copy_` at its end.

    The graph returns the result of `copy_` in place of the new value. Updates that count no version, or are of inputs
    that overlap themselves or whose sizes change too, stay with the runtime.
    """
    joint = partitioned.joint
    signature, graph = joint.signature, partitioned.forward.graph
    resized = signature.reshaped | signature.swapped
    inside = [
        update
        for update in signature.updates
        if update.counted
        and not update.differentiable
        and update.input not in resized
        and not signature.inputs[update.input].spec.overlaps_itself
    ]
    if not inside:
        return partitioned
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for update in inside:
            node = graph.call_function(aten.copy_.default, (placeholders[update.input], results[update.output]))
            node.meta = placeholders[update.input].meta
            results[update.output] = node
    output.args = (results,)
    partitioned.forward.recompile()
    kept = tuple(effect for effect in signature.log if effect not in inside)
    changed = dataclasses.replace(joint, signature=dataclasses.replace(signature, log=kept))
    return dataclasses.replace(partitioned, joint=changed)
