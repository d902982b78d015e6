"""Graphs with sparse gradients, for compilers that know dense tensors only: cut where the first sparse tensor is made.

What comes before is a graph of plain dense tensors. The rest, a few operators that end in gradients as a rule, runs on
eager's kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch.graphs import GraphCopier
from .._torch.modules import make_graph_module
from ..graph.sparse import EMBEDDING_BACKWARD, gives_sparse
from .aliasing import results_of

__all__ = ["Cut", "around_sparse", "cut_at_sparse", "dense_results", "is_random", "only_in_gradients", "sparse_nodes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """`head` returns what the graph does, None at the positions in `moved`, and then what it makes for `tail`, which
    returns the results at those positions. `tail` takes the inputs at the positions in `around` before that.
    """

    head: fx.GraphModule
    tail: fx.GraphModule
    moved: tuple[int, ...]
    around: tuple[int, ...]


def sparse_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values are sparse tensors."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and gives_sparse(node.target, node.args, found.__contains__):
            found.add(node)
    return found


def cut_at_sparse(module: fx.GraphModule) -> Cut | None:
    """The two parts of a graph; None where all of it is dense."""
    below = sparse_nodes(module.graph)
    if not below:
        return None
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    for node in nodes:
        if not below.isdisjoint(node.all_input_nodes):
            below.add(node)
    results = results_of(module)
    moved = tuple(i for i, result in enumerate(results) if result in below)
    read = (node for user in nodes if user in below for node in user.all_input_nodes)
    given = [node for node in dict.fromkeys(read) if node not in below]
    inputs = [node for node in nodes if node.op == "placeholder"]
    around = tuple(i for i, node in enumerate(inputs) if node in given)
    made = [node for node in given if node.op != "placeholder"]
    head, tail = GraphCopier(), GraphCopier()
    for node in nodes:
        if node.op == "placeholder":
            head.placeholder(node)
        elif node not in below:
            head.copy(node)
    head.output([*(None if i in moved else result for i, result in enumerate(results)), *made])
    for node in (*(inputs[i] for i in around), *made):
        tail.placeholder(node)
    for node in nodes:
        if node in below:
            tail.copy(node)
    tail.output([results[i] for i in moved])
    head_module, tail_module = (make_graph_module(module, part.graph, "Part") for part in (head, tail))
    return Cut(head_module, tail_module, moved, around)


def around_sparse(module: fx.GraphModule, prepare: Callable[[fx.GraphModule], fx.GraphModule]) -> fx.GraphModule:
    """`prepare(module)`, where that is given the part without sparse tensors; `module` itself where it fails."""
    cut = cut_at_sparse(module)
    if cut is None:
        return prepare(module)
    prepared = prepare(cut.head)
    if prepared is cut.head:
        return module
    graph, output = prepared.graph, next(iter(reversed(prepared.graph.nodes)))
    results, count = results_of(prepared), len(results_of(module))
    *nodes, end = cut.tail.graph.nodes
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    made = dict(zip(nodes, [*(inputs[i] for i in cut.around), *results[count:]], strict=False))
    with graph.inserting_before(output):
        for node in nodes[len(made) :]:
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = node.meta
    for position, result in zip(cut.moved, end.args[0], strict=True):
        results[position] = made[result]
    output.args = (results[:count],)
    prepared.recompile()
    return prepared


def dense_results(module: fx.GraphModule) -> list[Any]:
    """The results of a graph, with the dense tensors that sparse ones are made of in their place."""
    cut = cut_at_sparse(module)
    if cut is None:
        return results_of(module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [*results_of(cut.head), *(inputs[i] for i in cut.around)]


def only_in_gradients(backward: fx.GraphModule) -> frozenset[int]:
    """The tangents that a backward does nothing with but to make sparse gradients of them, which are laid out as what
    comes in is.
    """
    tangents = [node for node in backward.graph.nodes if node.op == "placeholder" and node.name.startswith("tangents_")]
    return frozenset(
        i
        for i, node in enumerate(tangents)
        if node.users and all(user.target is EMBEDDING_BACKWARD for user in node.users)
    )


def is_random(module: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    targets = (node.target for node in module.graph.nodes if node.op == "call_function")
    return any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)
