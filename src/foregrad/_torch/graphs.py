"""fx graphs built node by node, what operators say of themselves, and sizes of symbols. Checked on torch 2.13.0.

`fx.Graph.create_node` looks for symbolic numbers in every argument and makes every name unique again: some 20 us a
node. A graph copied out of another one needs neither, and `GraphCopier` takes a quarter of that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg

__all__ = [
    "GraphCopier",
    "OperatorFacts",
    "is_higher_order",
    "is_operator",
    "operator_facts",
    "size_hint",
    "symbol_of",
    "symbols_in",
]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What an operator's schema and tags say.

    `name` is `namespace::name` without the overload. `written` are the positions of arguments that it writes to;
    `dropout` is (position, name, default) of its dropout probability, when it has one.
    """

    name: str
    returns_view: bool
    num_returns: int
    written: tuple[tuple[int, str], ...]
    dropout: tuple[int, str, Any] | None
    is_mutable: bool
    is_random: bool
    is_pointwise: bool
    takes_tensor: bool


def is_operator(target: Any) -> bool:
    """Whether `target` is one overload of a dispatcher operator, as in `torch.ops.aten.add.Tensor`."""
    return isinstance(target, OpOverload)


def is_higher_order(target: Any) -> bool:
    """Whether `target` is an operator that takes functions or graphs (`cond`, `scan`, a wrapped custom kernel)."""
    return isinstance(target, HigherOrderOperator)


def operator_facts(op: Any) -> OperatorFacts:
    """The facts of an operator for which `is_operator` holds."""
    schema = op._schema
    views = [r for r in schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    dropout = None
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            dropout = (position, argument.name, argument.default_value)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((position, argument.name))
    return OperatorFacts(
        name=op.name().partition(".")[0],
        returns_view=bool(views),
        num_returns=len(schema.returns),
        written=tuple(written),
        dropout=dropout,
        is_mutable=schema.is_mutable,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_pointwise=torch.Tag.pointwise in op.tags,
        takes_tensor=any("Tensor" in str(argument.type) for argument in schema.arguments),
    )


def size_hint(size: Any, fallback: int = 4096) -> int:
    """A size as a plain number, for estimates: of a symbolic one what it was at capture, with no guard added."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if isinstance(hint, int) else fallback


def symbols_in(value: Any) -> set[Any]:
    """The symbols (sympy) in a symbolic number, or in a tensor's sizes, strides and offset."""
    if isinstance(value, _SYMBOLIC):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        numbers: list[Any] = [*value.shape, *value.stride(), value.storage_offset()]
        return {s for n in numbers if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
    return set()


def symbol_of(value: Any) -> Any:
    """The symbol that a symbolic integer is, or None when it is an expression."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        return value.node.expr
    return None


class GraphCopier:
    """Copies nodes of one graph into a new one, keeping their names; operands must have been copied before.

    Names must be unique, as those of one graph are.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self._copy_of: Callable[[fx.Node], Any] = self.copies.__getitem__
        self._used_names = self.graph._graph_namespace._used_names
        self._name_of = self.graph._graph_namespace._obj_to_name
        self._index = self.graph._find_nodes_lookup_table.insert
        self._insert = self.graph._insert

    def placeholder(self, node: fx.Node) -> fx.Node:
        """A placeholder that stands for `node`, whatever kind of node that is."""
        copy = fx.Node(self.graph, node.name, "placeholder", node.name, (), {})
        return self._add(node, copy)

    def copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = node.args, node.kwargs
        if args:
            args = map_arg(args, self._copy_of)
        if kwargs:
            kwargs = map_arg(kwargs, self._copy_of)
        return self._add(node, fx.Node(self.graph, node.name, node.op, node.target, args, kwargs, node.type))

    def output(self, values: tuple[Any, ...]) -> fx.Node:
        """The output node, in terms of the original graph's nodes."""
        node: fx.Node = self.graph.output(map_arg(values, self._copy_of))
        return node

    def _add(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        name = node.name
        copy.meta = node.meta.copy()
        self._used_names.add(name)
        self._name_of[copy] = name
        self._insert(copy)
        self._index(copy)
        self.graph._len += 1
        self.copies[node] = copy
        return copy
