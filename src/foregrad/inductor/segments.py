"""A graph cut around foreign nodes, not for the compiler: segments between them are compiled, they run as is.

There are as few segments as the dependencies allow: a node goes into the first segment after all its operands, a write
to an input after all that reads the old value. Random operators keep their order, constants are in every segment that
reads them. Calls of repeated regions are foreign nodes too: the regions are compiled already.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import is_random, make_graph_module, piece
from .._torch.symbols import same_numbers
from ..backends.boxed import as_boxed
from ..backends.eager import eager_compiler
from ..backends.results import Contract, PromisedResult, promised
from ..graph.meta import TensorSpec, spec_of
from ..graph.role import LAID_OUT, called_region
from ..passes.aliasing import makes_memory, memory_of, tensors_in
from ..passes.mutations import by_memory
from .regions import is_random_region
from .repeats import is_view

Boxed = Callable[[list[Any]], Any]


def compile_around(
    gm: fx.GraphModule,
    foreign: set[fx.Node],
    compile_segment: Callable[[fx.GraphModule, list[Any], list[int]], Boxed],
    regions: Mapping[fx.GraphModule, Boxed] | None = None,
    donated: Sequence[int] = (),
) -> Boxed:
    """`gm` with everything but the nodes in `foreign` compiled; a function that empties its one list.

    Results of a segment have the sizes and strides of the graph. `regions`: compiled regions: their calls are foreign.
    `compile_segment` is told the operands that a segment may overwrite; `donated` are the graph's donated inputs.
    """
    segments = _cut(gm, foreign)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.pop(LAID_OUT, None)  # segments are compiled for the strides that it comes with
    for segment in segments:
        if segment.results or any(map(_is_write, segment.nodes)):
            module = piece(gm, segment.inputs, segment.nodes, tuple(segment.results), "Segment")
            results = promised(module, [str(node) for node in segment.results], range(len(segment.results)), None)
            values = [node.meta["val"] for node in segment.inputs]
            run = compile_segment(module, values, overwritable(gm, segment.inputs, segment.nodes, donated))
            call = graph.call_function(
                checked_once(run, module, results), tuple(copies[node] for node in segment.inputs)
            )
            for index, node in enumerate(segment.results):
                copies[node] = graph.call_function(operator.getitem, (call, index))
                copies[node].meta = node.meta
        for node in segment.foreign:
            for constant in node.all_input_nodes:
                if constant.op == "get_attr" and constant not in copies:
                    copies[constant] = graph.node_copy(constant, copies.__getitem__)
            region = called_region(gm, node)
            if region is None:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            else:
                copies[node] = graph.call_function((regions or {})[region], fx.map_arg(node.args, copies.__getitem__))
                copies[node].meta = node.meta
    output = next(iter(reversed(gm.graph.nodes)))
    for node in output.all_input_nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(output.args[0], copies.__getitem__))
    return eager_compiler(make_graph_module(gm, graph, "Segments"))


def overwritable(
    gm: fx.GraphModule, operands: Sequence[Any], part: Collection[fx.Node], donated: Sequence[int]
) -> list[int]:
    """The positions of the operands that a part of a backward may overwrite: only the part reads the value, and nothing
    else has its memory. `donated` are the positions of the graph's donated inputs; without any, nothing is overwritten.
    """
    if not donated:
        return []
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    owned, inside = {inputs[i] for i in donated}, set(part)
    return [q for q, value in enumerate(operands) if _is_whole(gm, value, owned) and _is_read_in(value, inside)]


def _is_whole(gm: fx.GraphModule, value: fx.Node, owned: Collection[fx.Node]) -> bool:
    """Whether a value is a whole piece of memory that the graph owns or makes."""
    spec, maker = spec_of(value), memory_of(value)
    is_made = not is_view(value) and (makes_memory(maker) or called_region(gm, maker[0]) is not None)
    return (value in owned or is_made) and isinstance(spec, TensorSpec) and spec.is_static and spec.is_dense


def _is_read_in(value: fx.Node, inside: Collection[fx.Node]) -> bool:
    return all(user in inside and (not is_view(user) or _is_read_in(user, inside)) for user in value.users)


class OtherStridesError(Exception):
    """A compiled part of a graph returns a value with strides that differ from the graph's."""


def checked_once(run: Boxed, module: fx.GraphModule, results: Sequence[PromisedResult]) -> Boxed:
    """`run`, compiled from `module`, checked in its first call. All inputs stay alive in the first call.

    Raises `OtherStridesError` if its `output_strides` differ from the strides in `results` and are symbolic: symbols
    can't be compared in the call.
    """
    for result, stride in zip(results, getattr(run, "output_strides", ()), strict=False):
        spec = result.spec
        is_asked = result.is_visible and stride is not None and isinstance(spec, TensorSpec) and not spec.is_static
        if is_asked and not same_numbers(spec.stride, stride):
            raise OtherStridesError(result.name)
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    constants = tensors_in(module)
    hold = set(range(len(inputs)))
    writes = getattr(run, "writes_into", ())
    contract = Contract("inductor", "a part", results, inputs, writes, constants, is_own=True, hold=hold)
    return as_boxed(run, first_call=contract.first_call)


@dataclasses.dataclass(slots=True)
class _Segment:
    """Nodes to compile, then foreign nodes; `results` are the compiled nodes that other nodes need."""

    nodes: list[fx.Node] = dataclasses.field(default_factory=list)
    foreign: list[fx.Node] = dataclasses.field(default_factory=list)
    inputs: list[fx.Node] = dataclasses.field(default_factory=list)
    results: list[fx.Node] = dataclasses.field(default_factory=list)


def _cut(gm: fx.GraphModule, foreign: set[fx.Node]) -> list[_Segment]:
    level: dict[fx.Node, int] = {}  # of the segment that a node is in
    segments = [_Segment()]
    aliases = by_memory(gm.graph.nodes)
    random, random_is_foreign = 0, False
    last = next((node for node in reversed(gm.graph.nodes) if called_region(gm, node) is not None), None)
    start = 0  # nodes after the last region that need no region would only hold memory meanwhile
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        before = node.all_input_nodes
        if _is_write(node):
            before = [*before, *(user for alias in aliases[memory_of(before[0])] for user in alias.users)]
        needed = [n for n in before if n in level]
        is_foreign = node in foreign
        at = max([0 if is_foreign else start, *(level[n] + (n in foreign and not is_foreign) for n in needed)])
        region = called_region(gm, node)
        if is_random(node) if region is None else is_random_region(region):
            at = random = max(at, random + (random_is_foreign and not is_foreign))
            random_is_foreign = is_foreign
        level[node] = at
        if node is last:
            start = at + 1
        while len(segments) <= at:
            segments.append(_Segment())
        (segments[at].foreign if is_foreign else segments[at].nodes).append(node)
    if last is None and len(segments) > 1:
        _join_first(gm, segments)
    for segment in segments:
        inside = set(segment.nodes)
        read = dict.fromkeys(n for node in segment.nodes for n in node.all_input_nodes if n.op != "get_attr")
        segment.inputs = [n for n in read if n not in inside]
        segment.results = [n for n in segment.nodes if any(user not in inside for user in n.users)]
    return segments


def _is_write(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def _join_first(gm: fx.GraphModule, segments: list[_Segment]) -> None:
    """Put the first segment into the second, if the foreign nodes in between need none of its values."""
    first, second = segments[:2]
    before = set(first.nodes)
    if any(is_random(node) or not before.isdisjoint(node.all_input_nodes) for node in first.foreign):
        return
    joined = before.union(second.nodes)
    first.nodes, second.nodes = [], [node for node in gm.graph.nodes if node in joined]
