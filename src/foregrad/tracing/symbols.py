"""Symbolic sizes of a capture: which dimensions of which inputs vary, and how the graphs compute with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from .._torch.graphs import symbol_of
from .._torch.symbols import SymbolTable, TracedInt, write_expression
from ..errors import UnsupportedError
from ..graph.meta import NodeMeta, TensorSpec
from ..graph.signature import SizeSymbol

__all__ = ["SizeNodes", "SizeSymbols"]

aten = torch.ops.aten

Limits = tuple["int | None", "int | None"]


class SizeSymbols:
    """The symbols made for the sizes of inputs; `bound` of the table says (entry of the input, dimension)."""

    def __init__(self, env: Any = None) -> None:
        self.table = SymbolTable(env)

    def spec(self, spec: TensorSpec, dims: Mapping[int, Limits], name: str, entry: Any) -> TensorSpec:
        """`spec` with symbols for the sizes at `dims`, and the strides that follow from them."""
        shape = [
            self.table.symbol(size, f"{name}.size({dim})", (entry, dim), dims[dim]) if dim in dims else size
            for dim, size in enumerate(spec.shape)
        ]
        stride = list(spec.stride)
        order = sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim))
        for inner, outer in itertools.pairwise(order):
            if spec.stride[outer] and spec.stride[outer] == spec.stride[inner] * spec.shape[inner]:
                stride[outer] = stride[inner] * shape[inner]
        return TensorSpec(
            tuple(shape), tuple(stride), spec.dtype, spec.device, spec.offset, conj=spec.conj, neg=spec.neg
        )

    def given(self, numbers: Iterable[Any], entry: Any) -> None:
        """Sizes that are symbolic already: those of a fake tensor, or one number (dimension None)."""
        for dim, number in numbers:
            symbol = symbol_of(number)
            if symbol is not None:
                self.table.bound.setdefault(symbol, (entry, dim))

    def number(self, value: int, name: str, entry: Any) -> Any:
        """A symbol for an argument that is an integer; the plain integer, where it can't be one."""
        number = self.table.symbol(value, name, (entry, None))
        return TracedInt(number.node) if isinstance(number, torch.SymInt) else value

    def signature(self, number: Mapping[int, int]) -> tuple[SizeSymbol, ...]:
        """What the signature says of the symbols; `number` has each input's position by the id of its entry."""
        found = []
        for symbol, (entry, dim) in self.table.bound.items():
            found.append(SizeSymbol(symbol, number[id(entry)], dim))
        return tuple(found)


class SizeNodes:
    """The nodes of a graph that compute with sizes."""

    def __init__(self, graph: fx.Graph, table: SymbolTable, placeholders: Mapping[int, fx.Node]) -> None:
        self.graph = graph
        self.table = table
        self.placeholders = placeholders  # by the id of an input's entry
        self.symbols: dict[Any, fx.Node] = {}
        self.written: dict[Any, Any] = {}

    def node(self, number: Any) -> Any:
        """The node of a symbolic number, or the plain number that it can only be."""
        expression = number.node.expr
        if expression not in self.written:
            for symbol in sorted(expression.free_symbols, key=str):
                if symbol not in self.symbols:
                    self.symbols[symbol] = self._size(symbol)
            self.written[expression] = write_expression(self.graph, number, self.symbols)
        return self.written[expression]

    def _size(self, symbol: Any) -> fx.Node:
        if symbol not in self.table.bound:
            raise UnsupportedError(f"a graph needs the number {symbol}, which none of the inputs that were given has.")
        entry, dim = self.table.bound[symbol]
        if dim is None:
            return self.placeholders[id(entry)]
        node = self.graph.create_node(
            "call_function", aten.sym_size.int, (self.placeholders[id(entry)], dim), {}, f"size_{symbol}"
        )
        node.meta = NodeMeta({"val": entry.spec.shape[dim], "partitioner_tag": "is_forward"})
        return node
