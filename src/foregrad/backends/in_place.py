"""Inputs that a graph writes by itself, as eager does.

A capture turns `p.mul_(0.9).add_(g)` into new values, and the runtime copies the last into `p`. If nothing reads an old
value later, and no result shares its memory, the eager backend computes the new value in the old value's place: by the
operator that writes into its operand, of lists too; for `x[:10] += 1` by a write to the ten elements. A new value
computed out of place is copied as soon as it exists.

Known weakness: a part of a part (`x[0][:10] += 1`) is copied whole.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from .._torch.ops import OpOverload, overloads_of
from ..errors import add_note
from ..graph.meta import TensorSpec, spec_of
from ..passes.aliasing import makes_memory, memory_of
from ..passes.mutations import Updates, by_memory, may_be_scheduled, scheduled
from ..tracing.kernels.checks import may_raise
from ..tracing.tape.opinfo import BY_STRIDES, op_info
from .calls import has_many_outputs

Node = torch.fx.Node

aten = torch.ops.aten
WROTE = "_foregrad_wrote"  # an attribute of an error in a graph that may have written to its inputs by then
_FEW_ELEMENTS = 1 << 14
_VIEWS: dict[object, object] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


@dataclasses.dataclass(slots=True)
class InPlace:
    """A graph's writes to its inputs: the nodes in the order to run; the `writers`, each with the function to call
    instead; the writers `into_inputs` (the rest write to the graph's own values); the inputs that are `copied` after a
    node, each with its new value; and the `updated` pairs of an input and an output that the graph thereby carries out.
    """

    nodes: list[Node]
    writers: dict[Node, Any] = dataclasses.field(default_factory=dict)
    into_inputs: set[Node] = dataclasses.field(default_factory=set)
    copied: dict[Node, list[tuple[Node, Node]]] = dataclasses.field(default_factory=dict)
    updated: tuple[tuple[int, int], ...] = ()


def tell_of_writes(error: BaseException, made: str) -> None:
    """Say with an error in a graph that some inputs may have their new values already. `made`: these inputs."""
    vars(error)[WROTE] = True
    text = f"foregrad: {made} before this error, as some are in eager. Restore these tensors before the next call."
    add_note(error, text)
    if sys.version_info < (3, 11):  # so that no notes are printed
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def written_in_place(nodes: Sequence[Node], updates: Sequence[tuple[int, int]]) -> InPlace:
    """The `updates` (pairs of an input and the output with its new elements) that a graph can write by itself."""
    if not updates or not may_be_scheduled(nodes):
        return InPlace([*nodes])
    ordered, tail = scheduled(nodes, updates)
    ordered, last_look = _behind_looks(ordered, tail)
    return _WriteSearch(ordered, tail, updates, last_look).run()


class _WriteSearch:
    def __init__(self, nodes: list[Node], tail: set[Node], updates: Updates, last_look: int) -> None:
        self.nodes, self.tail, self.last_look = nodes, tail, last_look
        self.position = {node: number for number, node in enumerate(nodes)}
        placeholders = [node for node in nodes if node.op == "placeholder"]
        returned: Any = nodes[-1].args[0]
        self.results: list[Any] = list(returned)
        self.updates = {(i, o): (placeholders[i], self.results[o]) for i, o in updates}
        self.aliases = by_memory(nodes)
        self.on_the_way: dict[Node, set[_Value]] = {}  # by input: the values that its new one is made from in its place
        for placeholder, root in self.updates.values():
            values = self.on_the_way.setdefault(placeholder, set())
            if isinstance(root, Node) and sum(map(self.results.count, self.aliases[memory_of(root)])) == 1:
                self._way(root, values)

    def run(self) -> InPlace:
        on_the_way = {node for values in self.on_the_way.values() for node, _ in values}
        writers = {node for node in self.tail | on_the_way if self._may_write(node)}
        while True:
            done = {pair for pair, update in self.updates.items() if self._is_made(*update, writers)}
            left = {placeholder for pair, (placeholder, _) in self.updates.items() if pair not in done}
            wrong = {node for node in writers if any(base in left for _, base in _written(node))}
            if not wrong:
                break
            writers -= wrong
        into_inputs = {node for pair in done for node, _ in self.on_the_way[self.updates[pair][0]]} & writers
        found = InPlace(self.nodes, {node: self._writing(node) for node in writers}, into_inputs)
        for pair, (placeholder, root) in self.updates.items():
            if pair not in done and self._may_copy(placeholder, root):
                waits = _is_small(placeholder) and self.position[_value(root)[0]] < self.last_look
                found.copied.setdefault(self.nodes[self.last_look] if waits else root, []).append((placeholder, root))
                done.add(pair)
        found.updated = tuple(sorted(done))
        return found

    def _way(self, value: Node, values: set[_Value]) -> Node:
        """Add to `values` the chain of values that `value` is made from in one place; gives the first."""
        while True:
            node, path = _value(value)
            bases = dict(_written(node))
            if path not in bases or (node, path) in values:
                return value
            values.add((node, path))
            value = bases[path]

    def _is_made(self, placeholder: Node, root: object, writers: set[Node]) -> bool:
        """Whether `writers` make the new value of an input in its place."""
        values = self.on_the_way[placeholder]
        while isinstance(root, Node) and root is not placeholder:
            node, path = value = _value(root)
            if node not in writers or value not in values:
                return False
            root = dict(_written(node))[path]
        return root is placeholder

    def _may_write(self, node: Node) -> bool:
        """Whether a node may compute into its operands."""
        written = _written(node)
        given = Counter(memory_of(operand) for operand in _operands(node)) if written else {}
        users = {_value(user)[1]: user for user in _picked(node)}
        for path, base in written:
            memory = memory_of(base)
            if base.op == "placeholder":
                if (node, path) not in self.on_the_way.get(base, ()):
                    return False
            elif not makes_memory(memory) or memory[0].op == "placeholder":
                return False
            if self._last_use(base) > self.position[node]:
                return False
            if node.target not in _VIEWS and (given[memory] != 1 or not _is_laid_out_as(users.get(path), base)):
                return False
        if any((node, path) in values for values in self.on_the_way.values() for path in users) and self._is_addressed(
            node
        ):
            return False  # an input may begin elsewhere in its memory than a new value would
        several = has_many_outputs(node)
        return bool(written) and all(user.target is operator.getitem for user in node.users if several)

    def _is_addressed(self, node: Node) -> bool:
        """Whether a reader of the node's results, or of their aliases, addresses memory from its beginning."""
        aliases = (alias for value in _picked(node) for alias in self.aliases[memory_of(value)])
        return any(user.target in BY_STRIDES for alias in aliases for user in alias.users)

    def _last_use(self, value: Node) -> int:
        """The position of the last node that reads a value, or its alias."""
        return max(self.position[user] for alias in self.aliases[memory_of(value)] for user in alias.users)

    def _may_copy(self, placeholder: Node, root: object) -> bool:
        """Whether an input can take its new value as soon as that is computed."""
        if not isinstance(root, Node) or not makes_memory(memory_of(root)) or memory_of(root)[0].op != "call_function":
            return False
        return not placeholder.users or self._last_use(placeholder) <= self.position[_value(root)[0]]

    def _writing(self, node: Node) -> Any:
        """The function called instead of the node's."""
        if node.target not in _VIEWS:
            return _form(node.target)
        whole, part, *_ = cast("tuple[Node, ...]", node.args)
        from_itself = memory_of(part) == memory_of(whole)
        return _writing_to_part(_VIEWS[node.target], from_itself=from_itself)


def _behind_looks(nodes: list[Node], tail: set[Node]) -> tuple[list[Node], int]:
    """(the nodes, small ones of the `tail` behind the last node with an error for some values; its position). A call
    with an error there is made again, by eager, unless inputs were already written to.
    """
    looks = [node for node in nodes if may_raise(node.target, spec_of(node))]
    last = nodes.index(looks[-1]) if looks else -1
    early, movable = {*nodes[: last + 1]}, tail.difference(looks)
    for node in reversed(nodes[: last + 1]):
        if node in movable and early.isdisjoint(node.users) and all(map(_is_small, [node, *_operands(node)])):
            early.remove(node)
    return sorted(nodes, key=lambda node: node not in early), len(early) - 1


def _is_small(node: Node) -> bool:
    """Whether the memory of a value is small."""
    spec = spec_of(memory_of(node)[0])
    return isinstance(spec, TensorSpec) and spec.is_static and spec.numel <= _FEW_ELEMENTS


_Value = tuple[Node, tuple[int, ...]]  # one result of a node, by the indices that take it


def _value(value: Node) -> _Value:
    path: tuple[int, ...] = ()
    while value.target is operator.getitem and isinstance(value.args[0], Node):
        value, path = value.args[0], (cast("int", value.args[1]), *path)
    return value, path


def _picked(node: Node) -> Iterator[Node]:
    """A node, and the nodes that pick its results."""
    stack = [node]
    while stack:
        value = stack.pop()
        yield value
        stack += [user for user in value.users if user.target is operator.getitem and user.args[0] is value]


def _operands(node: Node) -> Iterator[Node]:
    for value in (*node.args, *node.kwargs.values()):
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Node))


@functools.lru_cache(4096)
def _form(op: object) -> OpOverload | None:
    """The operator that computes as `op` does and writes the results into operands, a result for each."""
    if not isinstance(op, OpOverload) or op_info(op).is_random or op._schema.is_mutable:
        return None
    types = [str(argument.type) for argument in op._schema.arguments]
    for form in overloads_of(op.namespace, op._schema.name.partition("::")[2] + "_"):
        if [str(argument.type) for argument in form._schema.arguments] == types and form._schema.is_mutable:
            return form if len(op_info(form).writes) == len(op._schema.returns) else None
    return None


def _written(node: Node) -> list[tuple[tuple[int, ...], Node]]:
    """The operands that the node's form in place writes to, each with the result that it becomes."""
    if node.op != "call_function":
        return []
    if node.target in _VIEWS:
        return [((), node.all_input_nodes[0])]
    form = _form(node.target)
    if form is None:
        return []
    found: list[tuple[tuple[int, ...], Any]] = []
    writes = op_info(form).writes
    for number, position in enumerate(writes):
        value: Any = node.args[position] if position < len(node.args) else None
        path = (number,) if len(writes) > 1 else ()
        several = isinstance(value, (list, tuple))
        found += [((*path, at), item) for at, item in enumerate(value)] if several else [(path, value)]
    return found if all(isinstance(base, Node) for _, base in found) else []


def _is_laid_out_as(new: Node | None, old: Node) -> bool:
    if new is None:
        return True  # nobody reads it
    a, b = spec_of(new), spec_of(old)
    if not isinstance(a, TensorSpec) or not isinstance(b, TensorSpec) or not a.is_static or not b.is_static:
        return False
    return (a.shape, a.stride, a.dtype, a.device) == (b.shape, b.stride, b.dtype, b.device)


def _writing_to_part(view: Any, *, from_itself: bool) -> Callable[..., torch.Tensor]:
    def write_in_place(whole: torch.Tensor, part: torch.Tensor, *where: object, **more: object) -> torch.Tensor:
        view(whole.detach(), *where, **more).copy_(part.clone() if from_itself else part)
        return whole

    return write_in_place
