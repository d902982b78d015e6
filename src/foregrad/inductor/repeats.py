"""Regions of a graph that repeat: the layers of a model, in a joint graph or in one half, with or without modules.

Structure is the key: operators, constants, shapes, strides, dtypes, devices, reads, equal operands, and returned
values. Names of modules only choose between equally good places to cut.

Calls of regions that `foregrad.region` marked are compared with each other, wherever they are. Otherwise a row of
copies is a stretch of the graph's order with equal operators at one distance. The stretch is cut where kernels end and
the fewest bytes pass from one copy to the next. Copies at its ends that are wired differently are peeled off. A copy is
a stretch of a topological order, so it is convex: nothing outside lies between two of its nodes. Sizes, seeds, and
views that come once, if they need nothing but inputs, belong to no copy: they can be computed before all.

Known weakness: operators that come once in a copy tell its length; a row of copies without any is not found.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import symbols_in
from .._torch.nested import frozen
from .._torch.ops import OpOverload
from ..graph.meta import layout_of, nbytes_of, structure_of, value_of
from ..locks import cached_property
from ..tracing.tape.opinfo import BY_STRIDES, op_info

_FEWEST = 2  # operators in a copy
_CANDIDATES = 24  # distances that are tried
_TRIES = 12  # rows of copies that are tried in a stretch
_ENOUGH = 7  # from so many copies on, a fifth may be given up for a better cut


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """Equal copies, in their order.

    * `copies[j][r]`: node r of copy j. Node r has one operator in all copies.
    * `inputs[j][q]`: the outside value that copy j reads as operand q; equal operands are one. Constants of the graph,
      equal in all copies, are left out.
    * `results`: the r that are read outside their copy, or returned, in any copy.
    """

    copies: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[tuple[fx.Node, ...], ...]
    results: tuple[int, ...]


def find_repeats(
    graph: fx.Graph, keep_out: Collection[fx.Node] = (), *, fewest: int = 2, several: int = 1
) -> tuple[Repeat, ...]:
    """The repeated regions of a graph that have at least `fewest` copies, in the order of their first nodes.

    Regions do not overlap, and have no nodes in `keep_out`. A copy has at least `several` operators that compute:
    smaller copies are joined. Marked calls may have fewer copies and operators; `fewest=0` finds marked calls alone.
    """
    if not fewest and not has_marked_calls(graph):
        return ()
    order = _Order(graph, keep_out)
    repeats = order.marked()
    marked = sorted(order.place[node] for repeat in repeats for copy in repeat.copies for node in copy)
    waiting = list(itertools.pairwise([-1, *marked, len(order.nodes)])) if fewest else []
    waiting = [(before + 1, after) for before, after in waiting if after - before > _FEWEST]
    while waiting:
        start, stop = waiting.pop()
        for first, length, count in order.rows(start, stop, several):
            repeat = order.repeat(first, length, count, stop) if count >= fewest else None
            if repeat is not None and len(repeat.copies) >= fewest:
                break
        else:
            continue
        repeats.append(repeat)
        begin = order.place[repeat.copies[0][0]]
        waiting += [(start, begin), (begin + length * len(repeat.copies), stop)]
    return tuple(sorted(repeats, key=lambda repeat: order.place[repeat.copies[0][0]]))


def has_marked_calls(graph: fx.Graph) -> bool:
    """Whether the graph has calls of regions that `foregrad.region` marked."""
    return any(dict.get(node.meta, "marked_call") for node in graph.nodes)


class _Order:
    """The operators of a graph in their order, with equal numbers for equal operators."""

    def __init__(self, graph: fx.Graph, keep_out: Collection[fx.Node]) -> None:
        *nodes, output = graph.nodes
        self.keep_out = keep_out
        ahead: set[fx.Node] = set()  # nodes that can be computed before all copies
        self.nodes: list[fx.Node] = []
        for node in nodes:
            if node.op in ("placeholder", "get_attr") or (_is_scalar(node) and ahead.issuperset(node.all_input_nodes)):
                ahead.add(node)
            else:
                self.nodes.append(node)
                if _target(node) == _SEEDS:
                    ahead.add(node)
        self.returned = set(output.all_input_nodes)
        keys = {node: self._key(node) if _may_repeat(node) and node not in keep_out else node for node in self.nodes}
        times = collections.Counter(keys.values())
        for node in self.nodes:  # a layer's part of a weight that holds all layers
            if is_view(node) and times[keys[node]] == 1 and ahead.issuperset(node.all_input_nodes):
                ahead.add(node)
        self.nodes = [node for node in self.nodes if node not in ahead or _target(node) == _SEEDS]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        numbers: dict[Any, int] = {}
        self.keys = [numbers.setdefault(keys[node], len(numbers)) for node in self.nodes]

    def _key(self, node: fx.Node) -> Any:
        return structure_of(node, _kind_of_operand), node in self.returned

    def marked(self) -> list[Repeat]:
        """The marked calls that have equals. A call interrupted by foreign nodes counts as several. Equal calls may
        differ in the values that the graph returns.
        """
        rows: dict[Any, list[list[fx.Node]]] = {}
        for call, stretch in itertools.groupby(self.nodes, key=self._marked_call):
            nodes = list(stretch)
            if call and not all(map(is_view, nodes)):
                keys = tuple(structure_of(node, _kind_of_operand) for node in nodes)
                rows.setdefault((keys, self._wiring(nodes)[0]), []).append(nodes)
        return [self._described(copies) for copies in rows.values() if len(copies) > 1]

    def _marked_call(self, node: fx.Node) -> int:
        """The number of the marked call that a node is in; 0 if there is none, or the node may be in no region."""
        call: int = dict.get(node.meta, "marked_call", 0)
        return call if call and _may_repeat(node) and node not in self.keep_out else 0

    def rows(self, start: int, stop: int, several: int) -> list[tuple[int, int, int]]:
        """(first, length, count) of rows of copies in a stretch, by the nodes they cover, the shortest copies first."""
        candidates = []
        for length in sorted(self._distances(start, stop)):
            for first, end in self._runs(start, stop - length, length):
                one = self.nodes[first : first + length]
                computing = sum(not is_view(node) for node in one)
                if not computing:
                    continue
                whole = length * -(-several // computing)
                count = (end - first + length) // whole
                # A longer copy must cover more than a shorter one by more than an end.
                if count > 1:
                    candidates.append((count * whole - whole // 2, first, whole, count))
        candidates.sort(key=lambda row: (-row[0], row[2]))
        return [(first, length, count) for _, first, length, count in candidates[:_TRIES]]

    def _distances(self, start: int, stop: int) -> list[int]:
        """The most frequent distances between equal operators."""
        seen: dict[int, int] = {}
        times: collections.Counter[int] = collections.Counter()
        for i in range(start, stop):
            before = seen.get(self.keys[i])
            if before is not None:
                times[i - before] += 1
            seen[self.keys[i]] = i
        # An operator that comes n times in a copy says nothing of the copy's length; the rare ones do.
        return [d for d, _ in times.most_common(_CANDIDATES) if _FEWEST <= d <= (stop - start) // 2]

    def _runs(self, start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
        """The stretches of at least `length` operators with equals at distance `length`."""
        keys, begin = self.keys, start
        for i in range(start, stop + 1):
            if i == stop or keys[i] != keys[i + length]:
                if i - begin >= length:
                    yield begin, i
                begin = i + 1

    def repeat(self, first: int, length: int, count: int, stop: int) -> Repeat | None:
        """The longest row of copies that are wired alike, or None."""
        end = first + length * count
        while end < stop and self.keys[end] == self.keys[end - length]:
            end += 1
        best: list[list[fx.Node]] = []
        for shift in self._cuts(first, end, length):
            begin = first + shift
            copies = [self.nodes[at : at + length] for at in range(begin, end - length + 1, length)]
            alike = _longest_alike([self._wiring(copy)[0] for copy in copies])
            # A cut inside of a kernel costs time in each call; a copy less costs time in the compiler, once.
            spared = len(best) // 5 if len(best) >= _ENOUGH else 0
            if alike[1] - alike[0] > len(best) + spared:
                best = copies[slice(*alike)]
            if len(best) + spared >= count:
                break
        return self._described(best) if len(best) > 1 else None

    def _cuts(self, first: int, end: int, length: int) -> list[int]:
        """The distances from `first` at which a copy may start, the best first. The fewest bytes inside of kernels are
        best: a kernel that the cut ends has to write them. Then come the fewest bytes across the cut in all.
        """
        passing, in_kernels = [0] * (end - first + 1), [0] * (end - first + 1)
        joined: dict[fx.Node, int] = {}  # the last place in the value's kernel that reads the value or a view
        for i in reversed(range(first, end)):
            node = self.nodes[i]
            users = [user for user in node.users if self.place.get(user, end) < end]
            in_kernel = [user for user in users if self.kernels[user] == self.kernels[node]]
            reads = [joined[user] if is_view(user) else self.place[user] for user in in_kernel]
            joined[node] = max(reads, default=0)
            last = max((self.place[user] for user in users), default=i)
            for bytes_at, end_of_use in ((passing, last), (in_kernels, max(joined[node], i))):
                bytes_at[i - first + 1] += nbytes_of(node)
                bytes_at[end_of_use - first + 1] -= nbytes_of(node)
        passing, in_kernels = list(itertools.accumulate(passing)), list(itertools.accumulate(in_kernels))
        middle = (end - first) // length // 2 * length

        def price(shift: int) -> tuple[int, int, bool, int]:
            at, k = first + middle + shift, min(middle + shift, len(passing) - 1)
            inside = at < end and _module(self.nodes[at]) == _module(self.nodes[at - 1])
            return in_kernels[k], passing[k], inside, shift

        return sorted(range(length), key=price)[:8]

    @cached_property
    def kernels(self) -> dict[fx.Node, Any]:
        """The kernel of each node, as a number: compilers may fuse operators of one number. Products, convolutions and
        attentions have half numbers, between the kernels before and after.
        """
        found: dict[fx.Node, Any] = {}
        for node in self.nodes:
            stages = [found[operand] for operand in node.all_input_nodes if operand in found]
            if stages and (is_view(node) or node.target is operator.getitem):
                found[node] = stages[0]
            elif _is_product(node.target):
                found[node] = max(map(math.ceil, stages), default=0) + 0.5
            else:
                found[node] = max(map(math.ceil, stages), default=0)
        return found

    def _wiring(self, copy: Sequence[fx.Node]) -> tuple[Any, tuple[fx.Node, ...]]:
        """(the operands of each node, by place in the copy or by number among outside operands; the outside ones)."""
        place = {node: r for r, node in enumerate(copy)}
        outside: dict[fx.Node, int] = {}
        reads: list[tuple[int, Any]] = []
        for node in copy:
            for operand in node.all_input_nodes:
                at = place.get(operand)
                if at is not None:
                    reads.append((0, at))
                elif operand.op == "get_attr":
                    reads.append((2, operand.target))
                else:
                    reads.append((1, outside.setdefault(operand, len(outside))))
        return tuple(reads), tuple(outside)

    def _described(self, copies: list[list[fx.Node]]) -> Repeat:
        results = set()
        for copy in copies:
            inside = set(copy)
            for r, node in enumerate(copy):
                if node in self.returned or not inside.issuperset(node.users):
                    results.add(r)
        inputs = tuple(self._wiring(copy)[1] for copy in copies)
        return Repeat(tuple(map(tuple, copies)), inputs, tuple(sorted(results)))


@functools.cache
def _is_product(target: Any) -> bool:
    from torch.utils.flop_counter import flop_registry  # late: nothing that is imported with foregrad needs it

    packet = getattr(target, "overloadpacket", None)
    return packet in flop_registry or "scaled_dot_product" in str(packet)


def _longest_alike(wirings: Sequence[Any]) -> tuple[int, int]:
    """The longest stretch of equal wirings."""
    best, begin = (0, 0), 0
    for j in range(1, len(wirings) + 1):
        if j == len(wirings) or wirings[j] != wirings[begin]:
            best = max(best, (begin, j), key=lambda pair: pair[1] - pair[0])
            begin = j
    return best


def _module(node: fx.Node) -> str | None:
    """The innermost module that a node was recorded in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else None


_SEEDS, _SEED = "prims.inductor_seeds.default", "prims.inductor_lookup_seed.default"


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is in the memory of its first operand."""
    source = node.args[0] if node.target is operator.getitem else node
    return (
        isinstance(source, fx.Node)
        and isinstance(source.target, OpOverload)
        and op_info(source.target).is_view
        and bool(source.args)
        and isinstance(source.args[0], fx.Node)
    )


def _target(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, OpOverload) else ""


def _is_scalar(node: fx.Node) -> bool:
    """Whether a value is a number, or a seed of random numbers."""
    value = value_of(node)
    return isinstance(value, _NUMBERS) or _target(node) == _SEED


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _may_repeat(node: fx.Node) -> bool:
    """Whether a node may be in a copy: a function of tensors and numbers, to tensors, that writes nowhere."""
    if node.op != "call_function" or _target(node) == _SEEDS or _is_scalar(node):
        return False
    if isinstance(node.target, OpOverload):
        info = op_info(node.target)
        if node.target.namespace == "foregrad" or info.writes or info.hidden_writes:
            return False
        if node.target in BY_STRIDES:
            return False
    elif node.target is not operator.getitem:
        return False
    constants = (operand for operand in node.all_input_nodes if operand.op == "get_attr")
    return all(value_of(constant) is not None for constant in constants) and value_of(node) is not None


def layout_key(node: fx.Node) -> Any:
    """A key that is equal for nodes that make tensors of equal layouts, in memory of their own or at equal distances in
    that of their first operand; None if operator and operands do not decide that.
    """
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    if not values or not isinstance(node.target, OpOverload) or not _may_repeat(node):
        return None
    if not all(isinstance(value, torch.Tensor) and not symbols_in(value) for value in values):
        return None
    return node.target, frozen((node.args, node.kwargs), fx.Node, _layout)


def _layout(operand: fx.Node) -> Any:
    return layout_of(operand.meta["val"])


def _kind_of_operand(operand: fx.Node) -> Any:
    return operand.target if operand.op == "get_attr" else layout_of(value_of(operand))
