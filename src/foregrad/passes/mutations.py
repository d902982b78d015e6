"""Writes to inputs that a graph may carry out itself: a compiler that fuses writes each new value once, and the runtime
copies nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import torch
from torch import fx

from ..graph.effect_log import TakeView, Write
from ..graph.partitioned import Partitioned
from ..graph.signature import Signature

__all__ = ["copied_inside", "with_mutations_inside", "writes_for_the_graph"]

aten = torch.ops.aten


def writes_for_the_graph(signature: Signature) -> list[Write]:
    """The writes to whole inputs that nobody can see before the call is over."""
    if signature.may_stop or signature.attaches_late:
        return []
    elsewhere = signature.reshaped | signature.swapped | {i for _, group in signature.shared_memory for i in group}
    # Of a write that comes after a view was taken, autograd tells the view when it is next used.
    first = {*map(id, itertools.takewhile(lambda effect: not isinstance(effect, TakeView), signature.log))}
    return [
        update
        for update in signature.updates
        if id(update) in first
        and not update.differentiable
        and update.input not in elsewhere
        and not signature.inputs[update.input].spec.overlaps_itself
    ]


def copied_inside(graph: fx.Graph, updates: Iterable[tuple[int, int]]) -> list[fx.Node]:
    """Copy results of a graph into inputs at its end: a `copy_` for each pair of an input and a result."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(iter(reversed(graph.nodes)))
    copies = []
    with graph.inserting_before(output):
        for number, place in updates:
            node = graph.call_function(aten.copy_.default, (placeholders[number], output.args[0][place]))
            node.meta = placeholders[number].meta
            copies.append(node)
    return copies


def with_mutations_inside(partitioned: Partitioned) -> Partitioned:
    """Put each plain update of an input into the forward graph, as a `copy_` at its end.

    The graph returns the result of `copy_` in place of the new value. Updates that count no version stay with the
    runtime.
    """
    joint = partitioned.joint
    signature, graph = joint.signature, partitioned.forward.graph
    inside = [update for update in writes_for_the_graph(signature) if update.counted]
    if not inside:
        return partitioned
    copies = copied_inside(graph, [(update.input, update.output) for update in inside])
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    for update, copy in zip(inside, copies, strict=True):
        results[update.output] = copy
    output.args = (results,)
    partitioned.forward.recompile()
    kept = tuple(effect for effect in signature.log if effect not in inside)
    changed = dataclasses.replace(joint, signature=dataclasses.replace(signature, log=kept))
    return dataclasses.replace(partitioned, joint=changed)
