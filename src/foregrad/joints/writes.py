"""Updates of inputs that a joint graph without gradients writes itself."""

from __future__ import annotations

import dataclasses

from ..graph.joint import Partitioned
from ..passes.mutations import copied_inside, writes_for_the_graph


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
    kept = tuple(effect for effect in signature.effects.log if effect not in inside)
    effects = dataclasses.replace(signature.effects, log=kept)
    changed = dataclasses.replace(joint, signature=dataclasses.replace(signature, effects=effects))
    return dataclasses.replace(partitioned, joint=changed)
