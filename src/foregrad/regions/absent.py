"""Gradients that a region's backward may leave out, as only its run shows: a graph is cut behind each region's call.

Before the call there is one graph. Behind the call there is a graph for each set of gradients that it gave: a sum with
an absent gradient is its second summand, and a value that depends on absent gradients alone is absent, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from .._torch.graphs import depending_on, piece
from ..graph.calls import CALL, call_of
from ..graph.joint import JointGraph
from ..graph.role import GraphRole
from ..graph.slots import Tangent
from ..interrupts import held
from ..locks import make_lock, taken
from ..passes.aliasing import results_of
from ..passes.zeros import without_gradients
from .calls import RegionBackward

_Boxed = Callable[[list[Any]], Any]
_KEY = "foregrad gradients"


@dataclasses.dataclass(frozen=True, slots=True)
class CutAtRegion:
    """`head` returns the graph's results from before `call`, None for the rest, and then the values of `handed`. `rest`
    takes the values of `operands`, and the present gradients of `items`, by their positions among the results of the
    call. It returns the graph's other results, None in the place of the first. `around`: inputs of the graph that are
    read after the head, by position.
    """

    head: fx.GraphModule
    call: fx.Node
    rest: fx.GraphModule
    handed: list[fx.Node]
    around: dict[int, fx.Node]
    operands: list[fx.Node]
    items: dict[int, fx.Node]

    def compiled(
        self, role: GraphRole, gradients: int, compile_part: Callable[..., Any]
    ) -> tuple[_Boxed, None, tuple[()]]:
        """The backward: the part behind the call is compiled for the gradients that the call gives. The first
        `gradients` results are gradients.
        """
        count = len(results_of(self.rest))
        handed = tuple(range(count, count + len(self.handed)))
        role = dataclasses.replace(role, updates=(), donated=(), static_inputs=())
        visible = dataclasses.replace(role, visible_outputs=(*role.visible_outputs, *handed))
        head = compile_part(self.head, visible).run
        backward: Any = call_of(self.call.target, self.call.args)
        lock = make_lock()

        @functools.cache
        def rest_without(absent: frozenset[str]) -> _Boxed:
            rest = without_gradients(self.rest, self.rest.meta[_KEY], absent, gradients) if absent else self.rest
            rest.meta.update(self.rest.meta)
            boxed: _Boxed = compile_part(rest, role).run
            return boxed

        def run(values: list[Any]) -> list[Any]:
            at_hand = {node: values[i] for i, node in self.around.items()}
            results = head(values)
            at_hand.update(zip(self.handed, results[count:], strict=True))
            del results[count:]
            found = backward.gradients(fx.node.map_arg(self.call.args[1], at_hand.__getitem__))
            items = [(node, found[i]) for i, node in self.items.items()]
            del found
            with held, taken(lock):
                rest = rest_without(frozenset(node.name for node, gradient in items if gradient is None))
            rest_values = [at_hand[node] for node in self.operands]
            rest_values += [gradient for _, gradient in items if gradient is not None]
            del at_hand, items
            return [a if b is None else b for a, b in zip(results, rest(rest_values), strict=True)]

        return run, None, ()


def cut_at_region(module: fx.GraphModule, joint: JointGraph, role: GraphRole) -> CutAtRegion | None:
    """The parts of a backward around the first call of a region's backward."""
    if role.phase == "forward" or not joint.graph.find_nodes(op="call_function", target=CALL):
        return None
    slots = [*(info.slot for info in joint.signature.inputs), *joint.signature.tangent_slots()]
    named = zip(joint.placeholders(), slots, strict=True)
    tangents = {node.name for node, slot in named if isinstance(slot, Tangent)}
    calls = module.graph.find_nodes(op="call_function", target=CALL)
    call = next((node for node in calls if isinstance(call_of(node.target, node.args), RegionBackward)), None)
    if call is None or not tangents:
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
