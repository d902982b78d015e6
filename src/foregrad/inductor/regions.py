"""Outlining: each repeated region of a graph becomes a graph module of its own, called at each place.

A compiler that takes regions compiles each region once. In the graph a call is one node (`call_module`) with a tuple as
its value; names and metadata of the results stay on the nodes that pick them.

Aliasing is unchanged: each tensor that a region returns is in memory of its own, made by the region. Other views are
taken by the graph itself, of the region's operands and results. Symbolic sizes in a region are among its operands.

Regions write nowhere, and are called where their operators stood: random numbers are drawn in the order of the graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from .._torch.graphs import GraphCopier, is_random, make_graph_module, piece, symbol_of, symbols_in
from ..graph.meta import NodeMeta, TensorSpec, spec_of
from ..graph.role import REGION
from .repeats import Repeat, find_repeats, is_view

_MANY, _SEVERAL = 7, 16  # copies, and operators of each, from which on outlining pays


def outlined(
    gm: fx.GraphModule,
    keep_out: Collection[fx.Node] = (),
    *,
    regions: bool | str = "auto",
    several: int | None = None,
    to_read: bool = False,
) -> fx.GraphModule:
    """The graph with calls of its repeated regions; `gm` itself where there are none.

    `regions`: with "auto" a region has at least seven copies, with True two, with False there are only calls of regions
    that `foregrad.region` marked. Marked calls that are equal become regions in any case. `several`: the least number
    of operators that compute in an unmarked copy, by default 16. Nodes in `keep_out` stay in the graph. `to_read`: for
    a text: regions may return views.

    Examples:
        >>> import torch, foregrad
        >>> def f(x):
        ...     for _ in range(9):
        ...         x = (x.sin() * 2).cos()
        ...     return x
        >>> graph = foregrad.capture(f, torch.ones(3)).module
        >>> print(len(graph.graph.nodes), len(outlined(graph, several=2).graph.nodes))
        29 21
    """
    fewest = _MANY if regions == "auto" else 2 if regions else 0
    repeats = find_repeats(gm.graph, keep_out, fewest=fewest, several=several or _SEVERAL)
    found = [region for repeat in repeats if (region := _Region.of(repeat, to_read)) is not None]
    if not found:
        return gm
    stem = "region"
    while hasattr(gm, f"{stem}_0") or any(node.name.startswith(stem) for node in gm.graph.nodes):
        stem += "_"
    modules = {f"{stem}_{number}": region.module(gm) for number, region in enumerate(found)}
    ends = {copy[-1]: call for call in zip(modules, found, strict=True) for copy in call[1].repeat.copies}
    inside = {node for region in found for copy in region.repeat.copies for node in copy}
    copier = GraphCopier()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            copier.placeholder(node)
        elif node.op == "output":
            copier.output(node.args[0]).meta.update(copier.metadata(node))
        elif node not in inside:
            copier.copy(node)
        elif node in ends:
            title, region = ends[node]
            region.call(copier, title, node)
    graphs = (copier.graph, *(module.graph for module in modules.values()))
    paths = {str(node.target) for graph in graphs for node in graph.nodes if node.op in ("get_attr", "call_module")}
    given = {path: operator.attrgetter(path)(gm) for path in paths.difference(modules)}
    result = make_graph_module(given | modules, copier.graph)
    result.meta.update(gm.meta)
    return result


def sums_first(graph: fx.Graph) -> None:
    """Move each sum directly behind the operator that it reads. One kernel may compute both; regions end at kernels."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.sum.dim_IntList:
            (operand,) = node.all_input_nodes
            if operand.op == "call_function":
                operand.append(node)


def is_random_region(region: fx.GraphModule) -> bool:
    """Whether the region's calls draw random numbers."""
    return region.meta[REGION] is True


class _Region:
    """A repeat: the operators in its copies, their results, and the views that the graph takes in their place."""

    def __init__(self, repeat: Repeat, returned: set[int], views: set[int]) -> None:
        self.repeat, self.returned, self.views = repeat, sorted(returned), sorted(views)
        body, kept = repeat.copies[0], set[fx.Node]()
        for r in reversed(range(len(body))):
            if not is_view(body[r]) or r in returned or not kept.isdisjoint(body[r].users):
                kept.add(body[r])
        self.body = [node for node in body if node in kept]
        read = {operand for node in self.body for operand in node.all_input_nodes}
        self.reads = [q for q, node in enumerate(repeat.inputs[0]) if node in read]
        self.copy_at = {copy[-1]: j for j, copy in enumerate(repeat.copies)}

    @classmethod
    def of(cls, repeat: Repeat, with_views: bool) -> _Region | None:
        """The region of a repeat; None if it would return other values than tensors, or lack a size in its operands."""
        body = repeat.copies[0]
        place = {node: r for r, node in enumerate(body)}
        made_by = {r: _maker(body[r]) for r in repeat.results}
        alone = [maker for maker, times in Counter(made_by.values()).items() if times == 1 and maker in place]
        returned, views, waiting = set[int](), set[int](), list(repeat.results)
        while waiting:
            r = waiting.pop()
            if with_views or not is_view(body[r]) or made_by.get(r) in alone:
                if not isinstance(spec_of(body[r]), TensorSpec):
                    return None
                returned.add(r)
            elif r not in views:
                views.add(r)
                waiting += [place[operand] for operand in body[r].all_input_nodes if operand in place]
        region = cls(repeat, returned, views)
        sizes_known = sizes_are_given([repeat.inputs[0][q] for q in region.reads], region.body)
        return region if returned and sizes_known else None

    def module(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The region as a graph of its own."""
        copy, inputs = self.repeat.copies[0], self.repeat.inputs[0]
        module = piece(gm, [inputs[q] for q in self.reads], self.body, [copy[r] for r in self.returned], "Region")
        module.meta[REGION] = any(is_random(node) for node in self.body)
        return module

    def call(self, copier: GraphCopier, title: str, last: fx.Node) -> None:
        """Write the call that stands for the copy ending with `last`, and the views of its results."""
        j = self.copy_at[last]
        copy, inputs, writer = self.repeat.copies[j], self.repeat.inputs[j], copier.writer
        results = [copy[r] for r in self.returned]
        meta = NodeMeta(
            spec=tuple(spec_of(node) for node in results),
            late={"val": lambda: tuple(node.meta["val"] for node in results)},
        )
        args = tuple(copier.copies[inputs[q]] for q in self.reads)
        call = writer.add(f"{title}_{j}", "call_module", title, args, {}, meta)
        for position, node in enumerate(results):
            item = writer.add(node.name, "call_function", operator.getitem, (call, position), {}, copier.metadata(node))
            copier.copies[node] = item
        for r in self.views:
            copier.copy(copy[r])


def _maker(node: fx.Node) -> fx.Node:
    """The node that made the memory of a value, or the last view before one that is unknown."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def sizes_are_given(inputs: Collection[fx.Node], nodes: Collection[fx.Node]) -> bool:
    """Whether each symbol in the sizes of some nodes is a number, or a dimension, of an input."""
    symbols: set[Any] = set()
    for node in inputs:
        spec = spec_of(node)
        numbers = spec.shape if isinstance(spec, TensorSpec) else [node.meta.get("val")]
        symbols |= {symbol_of(number) for number in numbers}
    specs = [spec_of(node) for node in (*inputs, *nodes)]
    tensors = [part for spec in specs for part in (spec if isinstance(spec, tuple) else (spec,)) if part is not None]
    sizes = (size for spec in tensors for size in (*spec.shape, *spec.stride, spec.offset) if type(size) is not int)
    return all(symbols.issuperset(symbols_in(size)) for size in sizes)
