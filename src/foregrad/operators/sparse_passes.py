"""Graphs with sparse gradients, for compilers of dense tensors: cut where the first sparse tensor is made.

The head is a graph of plain dense tensors. The tail, a few operators that end in gradients, runs on eager's kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from .._torch.graphs import body_of, depending_on, ends_of, is_random, piece
from ..graph.role import GraphRole
from ..passes.aliasing import results_of
from ..passes.opaque import OpaqueValues
from .sparse import EMBEDDING_BACKWARD, MAY_MAKE, gives_sparse


@dataclasses.dataclass(frozen=True, slots=True)
class SparseCut:
    """The two parts of a graph. `head` returns the graph's results, None at the positions in `moved`, and then values
    for `tail`. `tail` returns the results in `moved`. `tail` takes the inputs at the positions in `around`, then the
    values from `head`.
    """

    head: fx.GraphModule
    tail: fx.GraphModule
    moved: tuple[int, ...]
    around: tuple[int, ...]
    count: int  # of the graph's results

    def compiled(self, role: GraphRole, _: int, compile_part: Callable[..., Any]) -> tuple[Any, Any, Any]:
        """The function of the whole graph, the strides of its results, and the inputs that it writes into."""
        handed_over = range(self.count, len(results_of(self.head)))
        visible = (*(i for i in role.visible_outputs if i not in self.moved), *handed_over)
        role = dataclasses.replace(role, updates=())  # of the whole graph
        compiled = compile_part(self.head, dataclasses.replace(role, visible_outputs=visible))
        tail = compile_part(self.tail, role, as_eager=True).run
        head, moved, around, count = compiled.run, self.moved, self.around, self.count

        def run(values: list[Any]) -> list[Any]:
            tail_values = [values[i] for i in around]
            results: list[Any] = head(values)
            tail_values += results[count:]
            del results[count:]
            for position, result in zip(moved, tail(tail_values), strict=True):
                results[position] = result
            return results

        strides = compiled.output_strides
        return run, None if strides is None else strides[:count], compiled.writes_into


def sparse_nodes(body: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes with sparse values."""
    nodes: set[fx.Node] = set()
    for node in body:
        if node.op == "call_function" and gives_sparse(node.target, node.args, nodes.__contains__):
            nodes.add(node)
    return nodes


def cut_at_sparse(module: fx.GraphModule) -> SparseCut | None:
    """The two parts of a graph; None if the whole graph is dense."""
    body = body_of(module)
    if MAY_MAKE.isdisjoint([id(node.target) for node in body]) or not sparse_nodes(body):
        return None
    below = depending_on(module.graph, sparse_nodes(module.graph.nodes))
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
    return SparseCut(head, tail, moved, around, len(results))


def cut_for_compiler(module: fx.GraphModule, joint: Any, role: GraphRole, *, as_eager: bool) -> Any:
    """The dense part of a graph, for a compiler, and the rest; None for a dense graph, and for eager's kernels."""
    cut = None if as_eager else cut_at_sparse(module)
    return _Eagerly(module) if cut is not None and any(map(is_random, cut.tail.graph.nodes)) else cut


@dataclasses.dataclass(frozen=True, slots=True)
class _Eagerly:
    """A graph with random numbers, drawn in the order of its nodes, and with sparse values."""

    module: fx.GraphModule

    def compiled(self, role: GraphRole, _: int, compile_part: Callable[..., Any]) -> tuple[Any, Any, Any]:
        whole = compile_part(self.module, role, as_eager=True)
        return whole.run, whole.output_strides, whole.writes_into


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
    """The tangents that a backward only makes sparse gradients from, in the tangent's layout."""
    tangents = [node for node in ends_of(backward)[0] if node.name.startswith("tangents_")]
    return frozenset(
        i
        for i, node in enumerate(tangents)
        if node.users and all(user.target is EMBEDDING_BACKWARD for user in node.users)
    )


SPARSE_VALUES = OpaqueValues(lambda graph: sparse_nodes(graph.nodes), around_sparse, dense_results, only_in_gradients)
