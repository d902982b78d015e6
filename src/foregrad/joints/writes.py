"""What a joint graph does itself besides its results: updates of inputs, prints and checks."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from .._torch.graphs import copied, make_graph_module
from ..graph.joint import JointGraph, Partitioned
from ..graph.meta import NodeMeta
from ..graph.slots import Checked
from ..passes.mutations import copied_inside, writes_for_the_graph


def with_mutations_inside(partitioned: Partitioned) -> Partitioned:
    """Put each plain update of an input into the forward graph, as a `copy_` at its end.

    The graph returns the result of `copy_` in place of the new value. The runtime makes updates that count no version.
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


def with_effects_inside(joint: JointGraph) -> JointGraph:
    """Put the prints and checks of the forward into the graph, in their order at the end of the forward.

    Outputs that only these needed leave the graph. A joint graph with an operator that the removal of dead code would
    take away stays as it is.
    """
    signature = joint.signature
    checks = signature.stops.checks
    if not all(check.is_operator for check in checks):
        return joint
    graph = copied(joint.graph)
    output = graph.output_node()
    results: Any = [*cast("Any", output.args[0])]
    computed = [node for node in graph.nodes if node.op != "placeholder"]
    first = next((node for node in computed if node.meta.get("partitioner_tag") == "is_backward"), output)
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_before(first):
        made = [graph.call_function(check.op, *check.arguments(inputs, results)) for check in checks]
    for node in made:
        node.meta = NodeMeta({"val": None, "partitioner_tag": "is_forward"})
    if not all(node.is_impure(impure_random=False) for node in made):
        return joint
    outputs = signature.graph_outputs
    kept = sum(not isinstance(slot, Checked) for slot in outputs.slots)  # all others come first
    output.args = ([*results[:kept], *results[len(outputs.slots) :]],)
    outputs = dataclasses.replace(outputs, slots=outputs.slots[:kept], specs=outputs.specs[:kept])
    signature = dataclasses.replace(
        signature, graph_outputs=outputs, stops=dataclasses.replace(signature.stops, checks=())
    )
    return dataclasses.replace(joint, module=make_graph_module(joint.module, graph, "JointGraph"), signature=signature)
