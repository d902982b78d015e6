"""Further residuals, needed by second derivatives alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from .._torch.graphs import GraphCopier, depending_on, make_graph_module
from ..graph.joint import JointGraph, Partitioned
from ..graph.meta import TensorSpec, spec_of


def results_read(joint: JointGraph) -> set[str]:
    """The differentiable outputs that the backward reads: its dependence on them goes through their own history."""
    signature = joint.signature
    outputs, after, read = joint.outputs(), None, set()
    for i in signature.gradients.differentiable:
        stack, seen = [outputs[i]], set()
        if i in signature.graph_outputs.runtime_views:
            continue
        while stack:
            node = stack.pop()
            seen.add(node)
            for user in node.users:
                if after is None and user.op != "output":
                    after = depending_on(joint.graph, joint.placeholders()[len(signature.inputs) :])
                if after is not None and user in after:
                    read.add(outputs[i].name)
                elif is_alias(user) and user.args[0] is node and user not in seen:
                    stack.append(user)
    return read


def also_saved(partitioned: Partitioned, names: Iterable[str]) -> Partitioned:
    """The halves with the values of the nodes called `names` saved too, if the forward has them."""
    missing = set(names) - {node.name for node in partitioned.saved_nodes}
    if not missing:
        return partitioned
    present = [n for n in partitioned.forward.graph.nodes if n.name in missing]
    more = [n for n in present if isinstance(spec_of(n), TensorSpec)]
    sizes = [n for n in present if isinstance(n.meta.get("val") if n.op == "placeholder" else None, torch.SymInt)]
    if not more and not sizes:
        return partitioned
    signature = partitioned.joint.signature
    tensors = signature.num_forward_outputs + len(partitioned.saved_tensors)
    forward, backward = GraphCopier(lambda node: node.meta), fx.Graph()
    for node in partitioned.forward.graph.nodes:
        if node.op == "output":
            kept = node.args[0]
            forward.output([*kept[:tensors], *more, *kept[tensors:], *sizes])
        else:
            forward.copy(node)
    before_tangents, before_tensors = len(partitioned.saved_nodes), len(partitioned.saved_sizes)
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(partitioned.backward.graph.nodes):
        for kept_node in (sizes if number == before_tensors else []) + (more if number == before_tangents else []):
            backward.placeholder(kept_node.name).meta = kept_node.meta
        if node.op == "output":
            backward.output([None if n is None else copies[n] for n in node.args[0]])
        else:
            copies[node] = backward.node_copy(node, copies.__getitem__)  # under a second name, if it is computed again
            copies[node].meta = node.meta
    return Partitioned(
        partitioned.joint,
        make_graph_module(partitioned.forward, forward.graph, "Forward"),
        make_graph_module(partitioned.backward, backward, "Backward"),
    )


def is_alias(node: fx.Node) -> bool:
    """Whether the operator's schema says that a result is in the memory of an operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)
