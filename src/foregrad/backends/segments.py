"""A graph cut around the nodes that a compiler can't take: what lies in between is compiled, they run as they are.

As few segments as the dependencies allow: a node goes into the first that comes after everything it needs. Random
operators keep their order, constants are in every segment that reads them.

Known weakness: a segment holds on to its inputs until it is done.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from .._torch.graphs import GraphCopier
from .._torch.modules import make_graph_module
from .boxed import as_boxed
from .eager import eager_compiler

__all__ = ["compile_around"]

Boxed = Callable[[list[Any]], Any]


def compile_around(
    gm: fx.GraphModule, foreign: set[fx.Node], compile_segment: Callable[[fx.GraphModule, list[Any]], Boxed]
) -> Boxed:
    """`gm` with everything but the nodes in `foreign` compiled; a function of one list, which it empties.

    What comes out of a segment has the sizes and strides that the graph says.
    """
    segments = _cut(gm, foreign)
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            made[node] = graph.node_copy(node, made.__getitem__)
    for segment in segments:
        if segment.results:
            module, inputs = segment.module(gm)
            run = as_boxed(compile_segment(module, inputs), num_outputs=len(segment.results))
            call = graph.call_function(_unboxed(run), tuple(made[node] for node in segment.inputs))
            for index, node in enumerate(segment.results):
                made[node] = graph.call_function(operator.getitem, (call, index))
        for node in segment.foreign:
            for constant in node.all_input_nodes:
                if constant.op == "get_attr" and constant not in made:
                    made[constant] = graph.node_copy(constant, made.__getitem__)
            made[node] = graph.node_copy(node, made.__getitem__)
    output = next(iter(reversed(gm.graph.nodes)))
    for node in output.all_input_nodes:
        if node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(fx.map_arg(output.args[0], made.__getitem__))
    whole: Any = eager_compiler(make_graph_module(gm, graph, "Segments"))
    whole.is_mixed = True  # what a segment returns is to be looked at
    return cast("Boxed", whole)


@dataclasses.dataclass(slots=True)
class _Segment:
    """Nodes to compile, then those that run as they are; `results` is what others need of the former."""

    nodes: list[fx.Node] = dataclasses.field(default_factory=list)
    foreign: list[fx.Node] = dataclasses.field(default_factory=list)
    inputs: list[fx.Node] = dataclasses.field(default_factory=list)
    results: list[fx.Node] = dataclasses.field(default_factory=list)

    def module(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
        """The segment as a graph of its own, and its example inputs."""
        copier = GraphCopier()
        for node in self.inputs:
            copier.placeholder(node)
        for node in self.nodes:
            for constant in node.all_input_nodes:
                if constant.op == "get_attr" and constant not in copier.copies:
                    copier.copy(constant)
            copier.copy(node)
        copier.output(tuple(self.results))
        return make_graph_module(gm, copier.graph, "Segment"), [node.meta["val"] for node in self.inputs]


def _cut(gm: fx.GraphModule, foreign: set[fx.Node]) -> list[_Segment]:
    level: dict[fx.Node, int] = {}  # of the segment that a node is in
    segments = [_Segment()]
    random, random_is_foreign = 0, False
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        needed = [n for n in node.all_input_nodes if n in level]
        is_foreign = node in foreign
        at = max((level[n] + (n in foreign and not is_foreign) for n in needed), default=0)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            at = random = max(at, random + (random_is_foreign and not is_foreign))
            random_is_foreign = is_foreign
        level[node] = at
        while len(segments) <= at:
            segments.append(_Segment())
        (segments[at].foreign if is_foreign else segments[at].nodes).append(node)
    for segment in segments:
        inside = set(segment.nodes)
        read = dict.fromkeys(n for node in segment.nodes for n in node.all_input_nodes if n.op != "get_attr")
        segment.inputs = [n for n in read if n not in inside]
        segment.results = [n for n in segment.nodes if any(user not in inside for user in n.users)]
    return segments


def _unboxed(run: Boxed) -> Callable[..., Any]:
    def segment(*args: Any) -> Any:
        values = list(args)
        del args
        return run(values)

    return segment
