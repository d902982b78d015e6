"""Saving more than the backward reads: what only a second derivative needs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from .._torch.modules import make_graph_module
from ..graph.joint import JointGraph
from ..graph.meta import TensorSpec, spec_of
from ..graph.partitioned import Partitioned

__all__ = ["also_saved", "results_read"]


def results_read(joint: JointGraph) -> set[str]:
    """The differentiable outputs that the backward reads: it is by their own history that it depends on them."""
    signature = joint.signature
    outputs = joint.outputs()
    placeholders = joint.placeholders()
    after = set(placeholders[len(signature.inputs) :])
    for node in joint.graph.nodes:
        if node.op == "call_function" and not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    found = set()
    for i in signature.differentiable:
        stack, seen = [outputs[i]], set()
        if i in signature.runtime_views:
            continue
        while stack:
            node = stack.pop()
            seen.add(node)
            for user in node.users:
                if user in after:
                    found.add(outputs[i].name)
                elif _is_view(user) and user.args[0] is node and user not in seen:
                    stack.append(user)
    return found


def also_saved(partitioned: Partitioned, names: Iterable[str]) -> Partitioned:
    """Let the forward save the values of the nodes called `names`, too, where it has them."""
    saved = {node.name for node in partitioned.saved_nodes}
    wanted = set(names) - saved
    found = [n for n in partitioned.forward.graph.nodes if n.name in wanted]
    more = [n for n in found if isinstance(spec_of(n), TensorSpec)]
    sizes = [n for n in found if isinstance(n.meta.get("val") if n.op == "placeholder" else None, torch.SymInt)]
    if not more and not sizes:
        return partitioned
    signature = partitioned.joint.signature
    tensors = signature.num_forward_outputs + len(partitioned.saved_tensors)
    forward, backward = fx.Graph(), fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in partitioned.forward.graph.nodes:
        if node.op == "output":
            kept = [None if n is None else made[n] for n in node.args[0]]
            more_kept, more_sizes = ([made[n] for n in nodes] for nodes in (more, sizes))
            forward.output([*kept[:tensors], *more_kept, *kept[tensors:], *more_sizes])
        else:
            made[node] = forward.node_copy(node, made.__getitem__)
            made[node].meta = node.meta
    before_tangents, before_tensors = len(saved), len(partitioned.saved_sizes)
    made = {}
    for number, node in enumerate(partitioned.backward.graph.nodes):
        inserted = (sizes if number == before_tensors else []) + (more if number == before_tangents else [])
        for kept_node in inserted:
            backward.placeholder(kept_node.name).meta = kept_node.meta
        if node.op == "output":
            backward.output([None if n is None else made[n] for n in node.args[0]])
        else:
            made[node] = backward.node_copy(node, made.__getitem__)
            made[node].meta = node.meta
    return Partitioned(
        partitioned.joint,
        make_graph_module(partitioned.forward, forward, "Forward"),
        make_graph_module(partitioned.backward, backward, "Backward"),
    )


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)
