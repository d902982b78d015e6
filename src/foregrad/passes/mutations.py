"""Writes that a graph may carry out itself: to inputs, and to values that the forward made for the backward alone.

A compiler that fuses writes each new value of an input once, and the runtime copies nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import ends_of, needed_by
from .._torch.ops import OpOverload, is_pointwise
from ..graph.effect_log import TakeView, Write
from ..graph.joint import Partitioned
from ..graph.meta import TensorSpec, spec_of
from ..graph.signature import Signature
from ..tracing.tape.opinfo import op_info
from .aliasing import Memory, memory_of, results_of
from .opaque import opaque_values

aten = torch.ops.aten


def writes_for_the_graph(signature: Signature) -> list[Write]:
    """The writes to whole inputs that nobody can see before the call is over."""
    if signature.may_stop:
        return []
    elsewhere = (
        signature.reshaped | signature.swapped | {i for _, group in signature.structure.shared_memory for i in group}
    )
    # Of a write that comes after a view was taken, autograd tells the view when it is next used.
    first = {*map(id, itertools.takewhile(lambda effect: not isinstance(effect, TakeView), signature.effects.log))}
    return [
        update
        for update in signature.updates
        if id(update) in first
        and not update.differentiable
        and update.input not in elsewhere
        and not signature.inputs[update.input].spec.overlaps_itself
    ]


def copied_inside(graph: fx.Graph, updates: Iterable[tuple[int, int]]) -> list[fx.Node]:
    """Copy results of a graph into inputs at its end: a `copy_` for each pair of an input and a result."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(iter(reversed(graph.nodes)))
    copies = []
    with graph.inserting_before(output):
        for number, place in updates:
            operands = placeholders[number], output.args[0][place]
            copies.append(graph.create_node("call_function", aten.copy_.default, operands, name="copy_"))
            copies[-1].meta = placeholders[number].meta
    return copies


# -------------------------------------------------------------------- donated inputs
# Donated inputs: inputs of a backward that it may overwrite, since the forward made them for it alone.
#
# A compiler that knows them writes gradients over activations that are not read again, in place of fresh memory. The
# analysis holds for the usual call. Whether it holds in a given call (the graph may be kept, a hook may keep a
# tensor) is checked before each: `runtime.compiled.overwriting`.


def donated_inputs(partitioned: Partitioned) -> tuple[int, ...]:
    """Positions of the backward's inputs that share memory with no input, output, gradient or other saved value."""
    shared = Counter(memory_of(node) for node in results_of(partitioned.forward) if isinstance(node, fx.Node))
    saved = {node.name: node for node in partitioned.saved_nodes}
    takes = dict.fromkeys(ends_of(partitioned.backward)[0])
    results = opaque_values().plain_results(partitioned.backward)
    returned = {memory_of(node, takes)[0] for node in results if isinstance(node, fx.Node)}
    positions = []
    for i, node in enumerate(takes):
        source = saved.get(node.name)
        if source is None or node in returned:
            continue  # a tangent; a gradient
        memory = memory_of(source)
        if memory[0].op == "call_function" and shared[memory] == 1 and _is_written_once(node, is_view=_is_view(source)):
            positions.append(i)
    return tuple(positions)


def _is_written_once(node: fx.Node, *, is_view: bool) -> bool:
    """Whether each element of a tensor has memory of its own; False for views with symbolic sizes."""
    spec = spec_of(node)
    if not isinstance(spec, TensorSpec):
        return False
    return not spec.overlaps_itself if spec.is_static else not is_view


def _is_view(node: fx.Node) -> bool:
    maker, index = memory_of(node)
    return node != maker and (index is None or node.args[:2] != (maker, index))


# -------------------------------------------------------------------- updates
# The order of a graph that writes to its inputs: an update comes as soon as its operands are there.
#
# A training step in program order computes all gradients, then all new parameters. A gradient without further readers
# can go before the next gradient is made. Only operators on elements move, and only to an earlier place: saved values
# and drawn numbers stay in order.


Node = fx.Node
Updates = Iterable[tuple[int, int]]  # an input, and the position among the results of its new value


def scheduled(nodes: Sequence[Node], updates: Updates) -> tuple[list[Node], set[Node]]:
    """(the nodes of a graph in the new order; the nodes on elements that compute new values)."""
    results: Any = nodes[-1].args[0]
    position = {node: number for number, node in enumerate(nodes)}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    roots = [(placeholders[number], results[output]) for number, output in updates]
    tail = needed_by([root for _, root in roots if isinstance(root, Node)], _may_move)
    after: dict[Node, int] = {}  # the last node that is computed otherwise and that a node of the tail needs
    for node in nodes:
        if node in tail:
            known = (after.get(n, -1 if n.op == "placeholder" else position[n]) for n in node.all_input_nodes)
            after[node] = max(known, default=-1)
    places: dict[Node, tuple[int, int]] = {}
    aliases = by_memory(nodes)
    for rank, (placeholder, root) in enumerate(roots):
        if after.get(root, -1) >= 0:
            readers = {user for alias in aliases[memory_of(placeholder)] for user in alias.users} - tail
            last = max([after[root], *(position[reader] for reader in readers)])
            _place(root, (last, rank), places, position)
    for node in reversed(nodes):
        if node in places:
            for operand in node.all_input_nodes:
                if operand in tail:
                    _place(operand, places[node], places, position)
    return sorted(nodes, key=lambda node: (*places.get(node, (position[node], -1)), position[node])), tail


def _place(node: Node, place: tuple[int, int], places: dict[Node, tuple[int, int]], position: dict[Node, int]) -> None:
    if position[node] > place[0]:
        places[node] = min(place, places.get(node, place))


def _may_move(node: Node) -> bool:
    """Whether a node works on elements, or on numbers."""
    if node.op != "call_function":
        return False
    op = node.target
    return not isinstance(op, OpOverload) or is_pointwise(op) or op_info(op).is_view


def by_memory(nodes: Iterable[Node]) -> dict[Memory, list[Node]]:
    """The values in each memory."""
    found: dict[Memory, list[Node]] = {}
    for node in nodes:
        found.setdefault(memory_of(node), []).append(node)
    return found


def may_be_scheduled(nodes: Sequence[Node]) -> bool:
    """False for a graph that calls Python: Python may read an input itself."""
    return isinstance(nodes[-1].args[0], (list, tuple)) and not any(map(_is_opaque, nodes))


def _is_opaque(node: Node) -> bool:
    """Whether a node runs code that may read an input itself, or gives views that are not in its schema."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target.namespace == "foregrad"
    return getattr(target, "__module__", "") not in (operator.__name__, "_operator", "math")
