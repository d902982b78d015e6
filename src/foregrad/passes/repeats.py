"""Regions of a graph that repeat: the layers of a model, in the forward and in the backward, with or without modules.

Structure is the key: operators, constants, shapes, strides, dtypes, devices, which value reads which, which operands
are one and the same, what the graph returns. Names of modules only choose between equally good places to cut.

A row of copies is a stretch of the graph's order in which equal operators come again at one distance. The stretch is
cut where the fewest bytes pass from one copy to the next; copies at its ends that are wired differently are peeled off.
A copy is a stretch of a topological order, so it is convex: nothing outside lies between two of its nodes.

Known weakness: a copy's length is told by operators that come once in it; a row of copies without any is not found.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from ..graph.meta import TensorSpec, nbytes_of

__all__ = ["Repeat", "find_repeats", "layout_of", "structure_of"]

_FEWEST = 2  # operators in a copy
_CANDIDATES = 24  # distances that are tried
_TRIES = 12  # rows of copies looked at, of those that a stretch may have
_FURTHEST = 2  # copies back that a carried value may come from


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """A row of equal copies, in their order.

    * `copies[j][r]`: node r of copy j. Node r is the same operator in each.
    * `inputs[j][q]`: what copy j reads from outside itself as operand q; equal operands are one.
    * `shared`: the q whose node is the same in all copies, as a mask: made once, before the first.
    * `carried[q]`: (m, r) where operand q is node r of the copy m before; the first m copies get theirs from elsewhere.
    * `results`: the r that are read outside their copy, or returned, in any copy.
    * `is_backward`: whether it depends on the tangents. `forward`, `forward_copies[j]`: then, the number of the repeat
      whose values it reads, and of its copy; None where that is not one and the same for each copy.
    * `label`: the path of the module that the first copy's nodes have in common, if any.
    """

    copies: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[tuple[fx.Node, ...], ...]
    shared: frozenset[int]
    carried: dict[int, tuple[int, int]]
    results: tuple[int, ...]
    is_backward: bool
    label: str | None
    forward: int | None = None
    forward_copies: tuple[int, ...] = ()

    @property
    def own(self) -> tuple[int, ...]:
        """The operands that each copy has of its own: parameters, and values kept for it."""
        return tuple(q for q in range(len(self.inputs[0])) if q not in self.shared and q not in self.carried)


def find_repeats(graph: fx.Graph) -> tuple[Repeat, ...]:
    """The repeated regions of a graph, none of which overlap, in the order of their first nodes."""
    order = _Order(graph)
    found: list[Repeat] = []
    waiting = [(0, len(order.nodes))]
    while waiting:
        start, stop = waiting.pop()
        for first, length, count in order.rows(start, stop):
            repeat = order.repeat(first, length, count, stop)
            if repeat is not None:
                break
        else:
            continue
        found.append(repeat)
        begin = order.place[repeat.copies[0][0]]
        waiting += [(start, begin), (begin + length * len(repeat.copies), stop)]
    found.sort(key=lambda repeat: order.place[repeat.copies[0][0]])
    return tuple(_joined(found))


class _Order:
    """The operators of a graph in their order, with a number that is equal for equal ones."""

    def __init__(self, graph: fx.Graph) -> None:
        *nodes, output = graph.nodes
        self.nodes = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.returned = set(output.all_input_nodes)
        self.in_backward: set[fx.Node] = set()
        for node in nodes:
            is_tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
            if is_tangent or any(operand in self.in_backward for operand in node.all_input_nodes):
                self.in_backward.add(node)
        numbers: dict[Any, int] = {}
        self.keys = [numbers.setdefault(self._key(node), len(numbers)) for node in self.nodes]

    def _key(self, node: fx.Node) -> Any:
        own = structure_of(node, lambda operand: layout_of(_value(operand)))
        return own, node in self.returned, node in self.in_backward

    def rows(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(first, length, count) of rows of copies in a stretch: by what they cover, the shortest of equals first."""
        found = []
        for length in sorted(self._distances(start, stop)):
            for first, end in self._runs(start, stop - length, length):
                count = (end - first + length) // length
                # What a longer copy covers more than a shorter one has to be more than an end.
                found.append((count * length - length // 2, first, length, count))
        found.sort(key=lambda row: (-row[0], row[2]))
        return [(first, length, count) for _, first, length, count in found[:_TRIES]]

    def _distances(self, start: int, stop: int) -> list[int]:
        """The distances at which operators come again most often."""
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
        """The stretches of at least `length` operators each of which comes again after `length` others."""
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
            if alike[1] - alike[0] > len(best) + (1 if best else 0):
                best = copies[slice(*alike)]
            if len(best) >= count - 1:
                break
        return self._described(best) if len(best) > 1 else None

    def _cuts(self, first: int, end: int, length: int) -> list[int]:
        """Where a copy may start, after `first`: where the fewest bytes pass comes first."""
        passing = [0] * (end - first + 1)
        for i in range(first, end):
            last = max((p for user in self.nodes[i].users if (p := self.place.get(user, end)) < end), default=i)
            size = nbytes_of(self.nodes[i])
            passing[i - first + 1] += size
            passing[last - first + 1] -= size
        for k in range(1, len(passing)):
            passing[k] += passing[k - 1]
        middle = (end - first) // length // 2 * length

        def price(shift: int) -> tuple[int, bool, int]:
            at = first + middle + shift
            inside = at < end and _module(self.nodes[at]) == _module(self.nodes[at - 1])
            return passing[min(middle + shift, len(passing) - 1)], inside, shift

        return sorted(range(length), key=price)[:8]

    def _wiring(self, copy: Sequence[fx.Node]) -> tuple[Any, tuple[fx.Node, ...]]:
        """(what each node reads, by its place in the copy or as an operand from outside, these operands)."""
        place = {node: r for r, node in enumerate(copy)}
        outside: dict[fx.Node, int] = {}
        reads = []
        for node in copy:
            for operand in node.all_input_nodes:
                at = place.get(operand)
                reads.append((0, at) if at is not None else (1, outside.setdefault(operand, len(outside))))
        return tuple(reads), tuple(outside)

    def _described(self, copies: list[list[fx.Node]]) -> Repeat:
        inputs = [self._wiring(copy)[1] for copy in copies]
        shared = frozenset(q for q, node in enumerate(inputs[0]) if all(row[q] is node for row in inputs))
        carried: dict[int, tuple[int, int]] = {}
        for q in range(len(inputs[0])):
            for back in range(1, min(_FURTHEST, len(copies) - 1) + 1) if q not in shared else ():
                r = next((r for r, node in enumerate(copies[-1 - back]) if node is inputs[-1][q]), None)
                if r is not None and all(inputs[j][q] is copies[j - back][r] for j in range(back, len(copies))):
                    carried[q] = (back, r)
        results = {
            r
            for copy in copies
            for r, node in enumerate(copy)
            if node in self.returned or not all(user in set(copy) for user in node.users)
        }
        return Repeat(
            tuple(map(tuple, copies)),
            tuple(inputs),
            shared,
            carried,
            tuple(sorted(results)),
            any(node in self.in_backward for node in copies[0]),
            _common_module(copies[0]),
        )


def _longest_alike(wirings: Sequence[Any]) -> tuple[int, int]:
    """The longest stretch of equal ones."""
    best, begin = (0, 0), 0
    for j in range(1, len(wirings) + 1):
        if j == len(wirings) or wirings[j] != wirings[begin]:
            best = max(best, (begin, j), key=lambda pair: pair[1] - pair[0])
            begin = j
    return best


def _joined(repeats: list[Repeat]) -> Iterator[Repeat]:
    """Each backward with the forward whose values it reads."""
    owner = {
        node: (number, j)
        for number, repeat in enumerate(repeats)
        if not repeat.is_backward
        for j, copy in enumerate(repeat.copies)
        for node in copy
    }
    for repeat in repeats:
        if repeat.is_backward:
            own = repeat.own
            rows = [[owner.get(row[q]) for row in repeat.inputs] for q in own]
            for row in sorted(rows, key=lambda row: sum(one is None for one in row)):
                pairs = [one for one in row if one is not None]
                if len(pairs) == len(row) and len({number for number, _ in pairs}) == 1:
                    numbers = tuple(j for _, j in pairs)
                    if len(set(numbers)) == len(numbers):
                        repeat = dataclasses.replace(repeat, forward=pairs[0][0], forward_copies=numbers)
                        break
        yield repeat


def structure_of(node: fx.Node, name: Callable[[fx.Node], Any]) -> Any:
    """What a node computes, as something hashable: operator, constants, layout; `name` says what an operand is."""
    return node.target, _part(node.args, name), _part(node.kwargs, name), layout_of(_value(node))


def layout_of(value: Any) -> Any:
    """Shape, strides, dtype and device of a tensor, or of each of several; else the type."""
    if isinstance(value, (tuple, list)):
        return tuple(map(layout_of, value))
    if isinstance(value, TensorSpec) and (token := value.token) is not None:
        known = _LAYOUTS.get(token)
        if known is None:  # a token tells of the offset too
            layout = value.shape, value.stride, value.dtype, value.device
            known = _LAYOUTS[token] = _LAYOUTS.setdefault(layout, object())
        return known
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value)
    stride = value.stride if isinstance(value, TensorSpec) else value.stride()
    return tuple(map(str, shape)), tuple(map(str, stride)), value.dtype, value.device


_LAYOUTS: dict[object, object] = {}  # by token, and by what counts here: comparing one object is cheap


def _value(node: fx.Node) -> Any:
    spec = dict.get(node.meta, "spec")
    return node.meta.get("val") if spec is None else spec


def _module(node: fx.Node) -> str | None:
    """The innermost module that a node was recorded in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else None


def _common_module(nodes: Sequence[fx.Node]) -> str | None:
    paths = [path.split(".") for node in nodes if (path := _module(node)) is not None]
    if len(paths) < len(nodes):
        return None
    common = [names[0] for names in zip(*paths, strict=False) if len(set(names)) == 1]
    return ".".join(common) or None


def _part(value: Any, name: Callable[[fx.Node], Any]) -> Any:
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (tuple, list)):
        return tuple([_part(item, name) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _part(item, name)) for key, item in value.items()])
    if isinstance(value, slice):
        return _part((value.start, value.stop, value.step), name)
    return type(value), repr(value)  # 1, 1.0 and True differ, and so do 0.0 and -0.0
