"""From a joint graph and a choice of residuals to the two halves. Every partitioner ends here.

A choice is any set of values that the forward can compute. The backward takes the residuals that it uses and recomputes
other values that it needs; the forward computes its outputs, its effects and the residuals.

Orders matter to peak memory. In the backward, a recomputed or delayed value comes right before its first use,
so a recomputed block lives only as long as its own backward. In the forward, a value for the backward only
(the mask of a relu, for instance) comes as soon as it can, so that its operands can be freed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import fx

from .._torch.graphs import GraphCopier, LateGraph, late_graph_module, make_graph_module, symbol_of, symbols_in
from ..errors import PartitionError
from ..graph.meta import TensorSpec, value_of
from ..graph.role import STAYS
from .classify import Kind
from .index import JointIndex, is_number
from .instead import Hosts, Replays, can_offload


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The halves, and the joint graph's nodes with values that pass between the halves (tensors, then numbers)."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    tensors: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Excerpt:
    """Some nodes of a graph, by themselves: `nodes` in order, and the nodes of the backward's own sequence."""

    nodes: Sequence[int]
    backward_sequence: Sequence[int]


def split(index: JointIndex, residuals: Iterable[fx.Node], offloaded: Iterable[int] = ()) -> Split:
    """Cut the joint graph at `residuals`. Inputs need not be listed, and values that the backward does not use are
    left out. The residuals in `offloaded` that can be moved wait in host memory. Raises `PartitionError` as
    `check_split` does.
    """
    used, in_backward = backward_needs(index, _numbers(index, residuals))
    tensors, numbers = _ordered(index, used)
    numbers = _with_size_symbols(index, tensors, numbers)
    away = can_offload(index, offloaded).intersection(tensors)
    replayed = [i for i in sorted(index.replays) if in_backward[i]]
    kept, nodes = [*numbers, *tensors], index.nodes
    halves = (
        LateGraph(
            [nodes[i] for i in index.inputs],
            constants := [node for node in nodes if node.op == "get_attr"],
            [*index.forward_outputs, *(nodes[i] for i in (*tensors, *numbers))],
            functools.cache(lambda: [nodes[i] for i in forward_order(index, kept) if index.kinds[i] is not Kind.INPUT]),
            lambda metadata=None: _forward_half(index, tensors, numbers, away, replayed, GraphCopier(metadata)),
        ),
        LateGraph(
            [nodes[i] for i in (*kept, *index.backward_inputs)],
            constants,
            index.gradients,
            functools.cache(lambda: [nodes[i] for i in backward_order(index, in_backward, kept)]),
            lambda metadata=None: _backward_half(index, kept, in_backward, away, replayed, GraphCopier(metadata)),
        ),
    )
    if STAYS in index.module.meta and not (away or replayed or index.duplicates):
        forward, backward = (late_graph_module(index.module, half) for half in halves)
    else:
        forward, backward = (make_graph_module(index.module, half.make()) for half in halves)
    return Split(forward, backward, tuple(nodes[i] for i in tensors), tuple(nodes[i] for i in numbers))


def check_split(index: JointIndex, residuals: Iterable[fx.Node]) -> None:
    """Raise `PartitionError` unless:

    * every residual is a node of this joint graph, and one the forward can compute without the tangents;
    * no residual is the tuple of an operator with several results (its items can be saved);
    * the backward needs to run no effect of the forward a second time, nor a random operator that is not in `replays`.
    """
    backward_needs(index, _numbers(index, residuals))


def _numbers(index: JointIndex, residuals: Iterable[fx.Node]) -> Iterator[int]:
    for node in residuals:
        if node not in index.number:
            raise PartitionError(f"{node.name} can't be saved: it is not a node of this joint graph")
        yield index.number[node]


def _chosen(index: JointIndex, residuals: Iterable[int]) -> bytearray:
    chosen, constant = bytearray(len(index)), Kind.CONSTANT
    kinds, needs_tangent, tuples = index.kinds, index.needs_tangent, index.tuples
    for i in residuals:
        if needs_tangent[i]:
            raise PartitionError(f"{index.describe(i)} can't be saved: it needs the tangents")
        if tuples[i]:
            raise PartitionError(
                f"{index.describe(i)} can't be saved: it has several results. Save the results that the backward "
                "needs (its getitem nodes)."
            )
        # A constant is an attribute of both halves.
        chosen[i] = kinds[i] is not constant
    return chosen


def backward_needs(
    index: JointIndex, residuals: Iterable[int], excerpt: Excerpt | None = None
) -> tuple[list[int], bytearray]:
    """(the residuals and inputs that the backward uses, a mask of the nodes that it computes), from one sweep over the
    graph or an excerpt of it.

    Raises `PartitionError` as `check_split` does.
    """
    chosen = _chosen(index, residuals)
    needed = bytearray(len(index))
    for i in index.gradient_numbers:
        needed[i] = 1
    if excerpt is not None:
        for i in excerpt.nodes:
            needed[i] |= index.needs_tangent[i] and index.for_backward[i]
    computed = bytearray(len(index))
    used = []
    kinds, needs_tangent, operands, once = index.kinds, index.needs_tangent, index.operands, set(index.once)
    is_input = Kind.INPUT
    for i in reversed(range(len(index)) if excerpt is None else excerpt.nodes):
        if i in once:
            if not index.in_forward[i]:
                needed[i] = 1
            elif needed[i] and not chosen[i] and i not in index.replays:
                raise PartitionError(
                    f"{index.describe(i)} would run a second time in the backward, and it "
                    f"{('draws random numbers' if kinds[i] is Kind.RANDOM else 'has an effect')}. Save its results, "
                    "or values that the backward computes from its results."
                )
        if not needed[i]:
            continue
        if not needs_tangent[i] and (chosen[i] or kinds[i] is is_input):
            used.append(i)
            continue
        computed[i] = kinds[i] is not is_input
        for operand in operands[i]:
            needed[operand] = 1
    used.reverse()
    return used, computed


def _ordered(index: JointIndex, used: list[int]) -> tuple[list[int], list[int]]:
    """(tensors, numbers), each in the graph's order; values that are neither come after the tensors."""
    tensors, unchecked, others, numbers = [], [], [], []
    for i in used:
        node = index.nodes[i]
        if index.kinds[i] is Kind.NUMBER or is_number(node):
            numbers.append(i)
        elif not isinstance(value_of(node), (TensorSpec, torch.Tensor, type(None))):
            others.append(i)
        elif node.meta.get("saved_tensor_with_no_vc_check", False):
            # PyTorch's runtime keeps these in a slice of their own.
            unchecked.append(i)
        else:
            tensors.append(i)
    return [*tensors, *unchecked, *others], numbers


def _with_size_symbols(index: JointIndex, tensors: list[int], numbers: list[int]) -> list[int]:
    """The numbers, preceded by the numbers that define any further symbol in the backward's placeholders.

    Compilers read sizes off the backward's placeholders, and must find where each symbol comes from.
    """
    definitions = {symbol_of(v): i for i, v in _defining_symbols(index)}
    if not definitions:
        return numbers
    taken = set(numbers)
    symbols = {symbol_of(index.nodes[i].meta.get("val")) for i in numbers}
    first: list[int] = []
    for i in [*numbers, *tensors, *index.backward_inputs]:
        for symbol in sorted(symbols_in(index.nodes[i].meta.get("val")) - symbols, key=str):
            symbols.add(symbol)
            if symbol in definitions and definitions[symbol] not in taken:
                first.append(definitions[symbol])
    return [*first, *numbers]


def _defining_symbols(index: JointIndex) -> list[tuple[int, object]]:
    """(node, its value), in reverse order, for nodes with one symbol as their value: inputs, and sizes or numbers that
    the forward computes and that are in no input.
    """
    definitions, inputs = [], set(index.inputs)
    for i in reversed(range(len(index))):
        meta = index.nodes[i].meta
        is_there = index.in_forward[i] or i in inputs
        if is_there and dict.get(meta, "spec") is None and isinstance(meta.get("val"), torch.SymInt):
            symbol = symbol_of(meta["val"])
            if symbol is not None:
                definitions.append((i, meta["val"], symbol))
    if all(i in inputs for i, *_ in definitions):
        return [(i, value) for i, value, _ in definitions]
    input_symbols = set().union(*(symbols_in(index.nodes[i].meta.get("val")) for i in inputs))
    return [(i, value) for i, value, symbol in definitions if i in inputs or symbol not in input_symbols]


# ------------------------------------------------------------------------------------------------ building the halves


def forward_order(index: JointIndex, residuals: list[int], excerpt: Excerpt | None = None) -> list[int]:
    """The nodes that the forward computes, for its outputs, its effects and the residuals, in the order they run;
    limited to the excerpt if there is one.
    """
    needed = bytearray(index.in_forward)
    nodes: Sequence[int] = range(len(index))
    if excerpt is not None:
        needed, nodes = bytearray(len(index)), excerpt.nodes
        for i in nodes:
            needed[i] = index.in_forward[i]
    for i in residuals:
        needed[i] = 1
    extra = []
    for i in reversed(nodes):
        if needed[i] and not index.in_forward[i]:
            extra.append(i)
            for operand in index.operands[i]:
                needed[operand] = 1
    order = [i for i in nodes if needed[i]]
    return _soon(index, order, extra) if extra else order


def _forward_half(
    index: JointIndex, tensors: list[int], numbers: list[int], away: set[int], replayed: list[int], copier: GraphCopier
) -> fx.Graph:
    order = forward_order(index, [*tensors, *numbers])
    for i in index.inputs:
        copier.placeholder(index.nodes[i])
    hosts = Hosts(index, away)
    replays = Replays(index, replayed)

    def moved(copier: GraphCopier, i: int) -> fx.Node | None:
        replays.note(copier, i)
        return hosts.send(copier, i)

    _copy(index, copier, order, moved)
    nodes = index.nodes
    kept = [hosts.nodes.get(i, nodes[i]) for i in tensors]
    kept += [*(replays.nodes[i] for i in replayed), *(nodes[i] for i in numbers)]
    _output(index, copier, [*index.forward_outputs, *kept], 0, len(index.forward_outputs))
    return copier.graph


def _soon(index: JointIndex, nodes: list[int], extra: list[int]) -> list[int]:
    """The forward's order, with each node that only the backward asked for as early as its operands allow."""
    missing = dict.fromkeys(extra, 0)
    waiting: dict[int, list[int]] = {}
    ready = []
    for i in reversed(extra):
        operands = index.operands[i]
        missing[i] = len(operands)
        for operand in operands:
            waiting.setdefault(operand, []).append(i)
        if not operands:
            ready.append(i)
    order: list[int] = []
    for i in nodes:
        if i in missing:
            continue
        ready.append(i)
        while ready:
            at = ready.pop()
            order.append(at)
            for user in reversed(waiting.get(at, ())):
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
    return [*order, *reversed(ready)]


def _backward_half(
    index: JointIndex, kept: list[int], computed: bytearray, away: set[int], replayed: list[int], copier: GraphCopier
) -> fx.Graph:
    nodes = index.nodes
    hosts, replays = Hosts(index, away), Replays(index, replayed)
    for at, i in enumerate([*kept, *index.backward_inputs]):
        if at == len(kept):
            for random in replayed:
                replays.placeholder(copier, random)
        if i in away:
            hosts.placeholder(copier, i)
            continue
        copier.placeholder(nodes[i])
        for duplicate in index.duplicates.get(i, ()):
            copier.copies[duplicate] = copier.copies[nodes[i]]
    order = backward_order(index, computed, kept, away)
    _copy(index, copier, order, lambda copier, i: hosts.fetch(copier, i) or replays.replay(copier, i))
    _output(index, copier, index.gradients, len(index.forward_outputs), len(index.gradients))
    return copier.graph


def backward_order(
    index: JointIndex,
    computed: bytearray,
    residuals: Iterable[int],
    away: Collection[int] = (),
    excerpt: Excerpt | None = None,
) -> list[int]:
    """The backward's order: nodes that need tangents, or have an effect, in their sequence; all others right before
    their first use, the residuals that are `away` in host memory as well.
    """
    operands = index.operands
    done = bytearray(len(computed))
    for i in [*residuals, *index.backward_inputs]:
        done[i] = i not in away
    order: list[int] = []
    items = _items_of_tuples(index, computed)

    def add(i: int) -> None:
        done[i] = 1
        order.append(i)
        for item in items.get(i, ()):
            # Items at once: the tuple would keep all items alive.
            done[item] = 1
            order.append(item)

    def pull(values: Iterable[int]) -> None:
        missing = [i for i in values if not done[i] and (computed[i] or i in away)]
        if not missing:
            return
        seen = set(missing)
        for i in missing:
            for operand in operands[i] if i not in away else ():
                if not done[operand] and operand not in seen and (computed[operand] or operand in away):
                    seen.add(operand)
                    missing.append(operand)
        for i in sorted(seen):
            if not done[i]:
                add(i)

    for i in (index if excerpt is None else excerpt).backward_sequence:
        if computed[i] and not done[i]:
            pull(operands[i])
            add(i)
    pull(index.gradient_numbers)
    return order


def _items_of_tuples(index: JointIndex, computed: bytearray) -> dict[int, list[int]]:
    """For each recomputed operator with several results, the items that the backward computes."""
    items: dict[int, list[int]] = {}
    for i in index.items:
        if computed[i]:
            items.setdefault(index.operands[i][0], []).append(i)
    return items


def _copy(
    index: JointIndex, copier: GraphCopier, order: list[int], moved: Callable[[GraphCopier, int], fx.Node | None]
) -> None:
    """Copy the nodes of `order`. `moved` copies a node that goes to or comes from host memory, else gives None."""
    nodes, duplicates, copies = index.nodes, index.duplicates, copier.copies
    for i in order:
        node = nodes[i]
        if node in copies:
            continue
        copy = moved(copier, i) or copier.copy(node)
        for duplicate in duplicates.get(i, ()):
            copies[duplicate] = copy


def _output(index: JointIndex, copier: GraphCopier, values: list[object], start: int, count: int) -> None:
    """The output node. Descriptions of the joint outputs, where a capture left them, go along with their outputs."""
    output = copier.output(tuple(values))
    output.meta = index.output.meta.copy()
    descriptions = output.meta.pop("desc", None)
    if isinstance(descriptions, (list, tuple)):
        mine = list(descriptions[start : start + count])
        output.meta["desc"] = mine + [None] * (len(values) - len(mine))
