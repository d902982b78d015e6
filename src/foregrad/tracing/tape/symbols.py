"""Symbolic sizes of a capture: which dimensions of which inputs vary, and how the graphs compute with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.cache_folder import why_no_folder
from ..._torch.fakes import FakeTensor, FakeTensorMode, NewFakeMode
from ..._torch.graphs import symbol_of
from ..._torch.symbols import SymbolTable, TracedInt, expression_in, has_symbolic, symbol_made, write_expression
from ...errors import UnsupportedError
from ...frontend.call import FlatCall
from ...graph.meta import NodeMeta, TensorSpec
from ...graph.signature import SizeSymbol
from ...subclasses.spec import WrapperSpec
from .tape import Entry

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
        stride = following_strides(spec, shape)
        return TensorSpec(tuple(shape), stride, spec.dtype, spec.device, spec.offset, conj=spec.conj, neg=spec.neg)

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

    def signature(self, number: Mapping[Entry, int]) -> tuple[SizeSymbol, ...]:
        """What the signature says of the symbols; `number` has each input's position by its entry."""
        found = []
        for symbol, (entry, dim) in self.table.bound.items():
            found.append(SizeSymbol(symbol, number[entry], dim))
        return tuple(found)


def following_strides(spec: TensorSpec | WrapperSpec, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a tensor laid out as `spec` is, of another, symbolic `shape`."""
    stride = list(spec.stride)
    order = sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim))
    for inner, outer in itertools.pairwise(order):
        if spec.stride[outer] and spec.stride[outer] == spec.stride[inner] * spec.shape[inner]:
            stride[outer] = stride[inner] * shape[inner]
    return tuple(stride)


def symbols_of_inputs(inputs: Sequence[Entry], numbers: Mapping[Entry, Any]) -> tuple[SizeSymbol, ...]:
    """Where each symbol is found: the first dimension of an input that is one, or the input that is that number.

    `numbers` has the symbolic numbers that inputs are, by entry.
    """
    found: dict[Any, SizeSymbol] = {}
    for position, entry in enumerate(inputs):
        sizes: list[tuple[int | None, Any]] = []
        if isinstance(entry.spec, TensorSpec):
            sizes = list(enumerate(entry.spec.shape))
        elif entry in numbers:
            sizes = [(None, numbers[entry])]
        for dim, size in sizes:
            symbol = symbol_of(size)
            if symbol is not None:
                found.setdefault(symbol, SizeSymbol(symbol, position, dim))
    return tuple(found.values())


class SizeNodes:
    """The nodes of a graph that compute with sizes, which they read off the graph's `inputs`."""

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Entry], nodes: Mapping[Entry, fx.Node], numbers: Mapping[Entry, Any]
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.nodes = nodes  # by an input's entry
        self.places = {info.symbol: info for info in symbols_of_inputs(inputs, numbers)}
        self.symbols: dict[Any, fx.Node] = {}
        self.written: dict[Any, Any] = {}

    def node(self, number: Any) -> Any:
        """The node of a symbolic number, or the plain number that it can only be."""
        expression = expression_in(number, self.symbols | self.places)
        if expression not in self.written:
            for symbol in sorted(expression.free_symbols, key=str):
                if symbol not in self.symbols:
                    self.symbols[symbol] = self._size(symbol)
            self.written[expression] = write_expression(self.graph, number, self.symbols, expression)
        return self.written[expression]

    def define(self, number: Any, node: fx.Node) -> None:
        """`node` computes this symbolic number."""
        self.symbols.setdefault(symbol_made(number), node)

    def _size(self, symbol: Any) -> fx.Node:
        place = self.places.get(symbol)
        if place is None:
            raise UnsupportedError(
                f"a derivative needs the size {symbol}, which nothing that it is given has. Compile with dynamic=False."
            )
        entry, dim = self.inputs[place.input], place.dim
        placeholder = self.nodes[entry]
        if dim is None:
            return placeholder
        node = self.graph.create_node("call_function", aten.sym_size.int, (placeholder, dim), {}, f"size_{symbol}")
        node.meta = NodeMeta({"val": entry.spec.shape[dim], "partitioner_tag": "is_forward"})  # type: ignore[union-attr]
        return node


def symbols_of(call: FlatCall) -> SizeSymbols | None:
    """For the sizes that are to be symbolic, or are so in fake tensors that were given."""
    for leaf in call.leaves:
        if has_symbolic(leaf.shape if isinstance(leaf, torch.Tensor) else leaf):
            return SizeSymbols(fake_mode_of(call, None).shape_env)
    return SizeSymbols() if call.dynamic or call.numbers else None


def fake_mode_of(call: FlatCall, symbols: SizeSymbols | None) -> FakeTensorMode:
    """The mode of the fake tensors that were given, or else a new one."""
    for leaf in call.leaves:
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    why_no_folder()  # PyTorch imports its compilers for fake tensors
    mode = NewFakeMode(shape_env=None if symbols is None else symbols.table.env)
    mode.cache_enabled = False  # what operators give is remembered by `Metadata`; once is enough
    return mode
