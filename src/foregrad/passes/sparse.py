"""Graphs with sparse gradients, for compilers of dense tensors: cut where the first sparse tensor is made.

The head is a graph of plain dense tensors. The tail, as a rule a few operators that end in gradients, runs on eager's
kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from .._torch.graphs import depending_on, ends_of, piece
from ..graph.sparse import EMBEDDING_BACKWARD, gives_sparse
from .aliasing import results_of


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The two parts of a graph. `head` returns the graph's results, None at the positions in `moved`, and then values
    for `tail`. `tail` returns the results in `moved`. `tail` takes the inputs at the positions in `around`, then the
    values from `head`.
    """

    head: fx.GraphModule
    tail: fx.GraphModule
    moved: tuple[int, ...]
    around: tuple[int, ...]


def sparse_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes with sparse values."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and gives_sparse(node.target, node.args, nodes.__contains__):
            nodes.add(node)
    return nodes


def cut_at_sparse(module: fx.GraphModule) -> Cut | None:
    """The two parts of a graph; None if the whole graph is dense."""
    below = depending_on(module.graph, sparse_nodes(module.graph))
    if not below:
        return None
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    results = results_of(module)
    moved = tuple(i for i, result in enumerate(results) if result in below)
    read = (node for user in nodes if user in below for node in user.all_input_nodes)
    operands = [node for node in dict.fromkeys(read) if node not in below]
    inputs = [node for node in nodes if node.op == "placeholder"]
    around = tuple(i for i, node in enumerate(inputs) if node in operands)
    handed = [node for node in operands if node.op != "placeholder"]
    dense = [node for node in nodes if node not in below and node.op not in ("placeholder", "get_attr")]
    left = [*(None if i in moved else result for i, result in enumerate(results)), *handed]
    head = piece(module, inputs, dense, left, "Part")
    operands = [*(inputs[i] for i in around), *handed]
    tail = piece(module, operands, [n for n in nodes if n in below], [results[i] for i in moved], "Part")
    return Cut(head, tail, moved, around)


def around_sparse(module: fx.GraphModule, prepare: Callable[[fx.GraphModule], fx.GraphModule]) -> fx.GraphModule:
    """`prepare(module)`, applied to the part without sparse tensors; `module` itself if that changes nothing."""
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
    copies = dict(zip(nodes, [*(inputs[i] for i in cut.around), *results[count:]], strict=False))
    with graph.inserting_before(output):
        for node in nodes[len(copies) :]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = node.meta
    for position, result in zip(cut.moved, end.args[0], strict=True):
        results[position] = copies[result]
    output.args = (results[:count],)
    prepared.recompile()
    return prepared


def dense_results(module: fx.GraphModule) -> list[Any]:
    """The results of a graph, with sparse results replaced by their dense parts."""
    cut = cut_at_sparse(module)
    if cut is None:
        return results_of(module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [*results_of(cut.head), *(inputs[i] for i in cut.around)]


def only_in_gradients(backward: fx.GraphModule) -> frozenset[int]:
    """The tangents that a backward only makes sparse gradients from; the gradients have the incoming tangent's
    layout.
    """
    tangents = [node for node in ends_of(backward)[0] if node.name.startswith("tangents_")]
    return frozenset(
        i
        for i, node in enumerate(tangents)
        if node.users and all(user.target is EMBEDDING_BACKWARD for user in node.users)
    )
