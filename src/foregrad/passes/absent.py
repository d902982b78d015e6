"""Gradients that a region's backward may leave out, as only its run shows: a graph is cut behind each such call.

What comes before the call is one graph. What comes behind it is a graph for each set of gradients that the call gave,
in which a sum with an absent gradient is its other summand, and what depends on absent ones alone is absent, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import fx

from .._torch.graphs import depending_on
from ..graph.eager_regions import RegionBackward
from ..graph.python_calls import CALL, call_of
from .aliasing import results_of
from .regions import piece
from .zeros import without_gradients

_KEY = "foregrad gradients"


@dataclasses.dataclass(frozen=True, slots=True)
class CutAtRegion:
    """`head` returns the graph's results that come before `call`, None for others, and then the values of `handed`.
    `rest` takes the values of `operands`, and those gradients of `items`, by their positions among the results of the
    call, that are there. It returns the graph's other results, None in the place of the first. `around`: inputs of the
    graph that are read after the head, by position.
    """

    head: fx.GraphModule
    call: fx.Node
    rest: fx.GraphModule
    handed: list[fx.Node]
    around: dict[int, fx.Node]
    operands: list[fx.Node]
    items: dict[int, fx.Node]

    def rest_without(self, absent: Collection[str], results: int) -> fx.GraphModule:
        """The rest for these absent items, by name; so many first `results` are gradients."""
        rest = without_gradients(self.rest, self.rest.meta[_KEY], absent, results) if absent else self.rest
        rest.meta.update(self.rest.meta)
        return rest


def cut_at_region(module: fx.GraphModule, tangents: Collection[str]) -> CutAtRegion | None:
    """The parts of a backward around the first call of a region's backward; `tangents`: the names of its tangents."""
    calls = module.graph.find_nodes(op="call_function", target=CALL)
    call = next((node for node in calls if isinstance(call_of(node.target, node.args), RegionBackward)), None)
    if call is None:
        return None
    nodes = [node for node in module.graph.nodes if node.op not in ("output", "get_attr")]
    at, results = nodes.index(call), results_of(module)
    inputs = [node for node in nodes if node.op == "placeholder"]
    items = {user.args[1]: user for user in call.users if user.op != "output"}
    before = [node for node in nodes[:at] if node.op != "placeholder"]
    behind = [node for node in nodes[at + 1 :] if node.op != "placeholder" and node not in {*items.values()}]
    after = {*items.values(), *behind}
    read = [node for user in behind for node in user.all_input_nodes]
    operands = [node for node in dict.fromkeys(read) if node not in after and node.op != "get_attr"]
    needed = dict.fromkeys([*call.all_input_nodes, *operands])
    handed = [node for node in needed if node.op != "placeholder"]
    first = [None if result in after else result for result in results]
    head = piece(module, inputs, before, [*first, *handed], "Part")
    left = [result if result in after else None for result in results]
    rest = piece(module, [*operands, *items.values()], behind, left, "Part")
    found = [node for node in nodes if node.name in tangents]
    gradients = module.meta.get(_KEY) or {node.name for node in depending_on(module.graph, found)}
    for part in (head, rest):
        part.meta.update(module.meta)
    rest.meta[_KEY] = gradients
    around = {i: node for i, node in enumerate(inputs) if node in needed}
    return CutAtRegion(head, call, rest, handed, around, operands, items)
