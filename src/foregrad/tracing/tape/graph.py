"""The tape's live entries as an fx graph with PyTorch's conventions for joint graphs."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.fakes import FakeTensorMode, new_fake
from ..._torch.graphs import GraphWriter, is_higher_order, make_graph_module, symbol_of
from ..._torch.nested import mapped
from ..._torch.ops import OPAQUE, is_opaque_value
from ..._torch.symbols import expression_in, map_symbolic, symbol_made, with_part_named, write_expression
from ...errors import UnsupportedError
from ...graph.meta import NodeMeta, TensorSpec
from ...graph.signature import SizeSymbol
from .origin import Origin
from .tape import Entry, Tape, map_entries

aten = torch.ops.aten


def build_module(
    tape: Tape,
    primals: Sequence[Entry],
    tangents: Sequence[Entry],
    outputs: Sequence[Entry | None],
    fake_mode: FakeTensorMode,
    name: str,
    symbolic: bool = False,
    numbers: Mapping[Entry, object] | None = None,
) -> fx.GraphModule:
    """`(primals..., tangents...) -> outputs` from the entries that the outputs or an effect need.

    `symbolic`: there may be symbolic sizes. `numbers`: the symbolic numbers that entries are, by entry.
    """
    return _GraphBuilder(tape, fake_mode, symbolic, numbers or {}).build(primals, tangents, outputs, name)


class _GraphBuilder:
    def __init__(self, tape: Tape, fake_mode: FakeTensorMode, symbolic: bool, numbers: Mapping[Entry, object]) -> None:
        self.numbers = numbers
        self.symbolic = symbolic
        self.sizes: SizeNodes | None = None
        self.tape = tape
        self.fake_mode = fake_mode
        self.writer = GraphWriter()
        self.graph = self.writer.graph
        self.root = torch.nn.Module()
        self.nodes: dict[Entry, fx.Node] = {}
        self.constants = 0
        self.objects: dict[object, fx.Node] = {}
        self.operators: dict[int, tuple[str, bool]] = {}  # see `_about`

    def build(
        self, primals: Sequence[Entry], tangents: Sequence[Entry], outputs: Sequence[Entry | None], name: str
    ) -> fx.GraphModule:
        for prefix, entries in (("primals", primals), ("tangents", tangents)):
            half = "is_backward" if prefix == "tangents" else "is_forward"
            for number, entry in enumerate(entries, 1):
                entry.name = self.writer.name(f"{prefix}_{number}")
                meta = self._meta(entry)
                meta["partitioner_tag"] = half
                self.nodes[entry] = self.writer.add(entry.name, "placeholder", entry.name, (), {}, meta)
        if self.symbolic:
            self.sizes = SizeNodes(self.graph, primals, self.nodes, self.numbers)
        for entry in self.tape.live(outputs):
            if entry not in self.nodes:
                self._add(entry)
        self.graph.output([None if e is None else self.nodes[e] for e in outputs])
        return make_graph_module(self.root, self.graph, name)

    def _add(self, entry: Entry) -> None:
        if entry.target is None:
            assert entry.constant is not None, "an input that was not declared"
            attribute = f"_tensor_constant{self.constants}"
            self.constants += 1
            self.root.register_buffer(attribute, entry.constant, persistent=False)
            node = self.graph.get_attr(attribute)
            node.meta = self._meta(entry)
        else:
            args = map_entries(entry.args, self._node)
            kwargs = map_entries(entry.kwargs, self._node) if entry.kwargs else {}
            if self.sizes is not None:
                args, kwargs = map_symbolic(args, self.sizes.node), map_symbolic(kwargs, self.sizes.node)
            base, takes_objects = self.operators.get(id(entry.target)) or self._about(entry.target)
            if takes_objects:
                args, kwargs = mapped((args, kwargs), tuple(_OBJECTS), self._read)
            name = self.writer.name(base)
            node = self.writer.add(name, "call_function", entry.target, args, kwargs, self._meta(entry))
        entry.name = node.name
        self.nodes[entry] = node
        number = self.numbers.get(entry)
        if self.sizes is not None and isinstance(number, torch.SymInt):
            self.sizes.define(number, node)

    def _about(self, target: object) -> tuple[str, bool]:
        """The name of an operator's nodes, and whether it takes objects that the graph's module holds."""
        about = self.operators[id(target)] = _name(target), _takes_objects(target)
        return about

    def _read(self, value: object) -> Any:
        """An object read from the module: compilers look there for graphs, and others have no spelling in its code."""
        if is_opaque_value(value):
            return value  # which has a spelling
        node = self.objects.get(value)
        if node is None:
            prefix = next(prefix for kind, prefix in _OBJECTS.items() if isinstance(value, kind))
            prefix = prefix or value.__class__.__name__ + "_"
            attribute = prefix + str(next(n for n in itertools.count() if not hasattr(self.root, f"{prefix}{n}")))
            setattr(self.root, attribute, value)
            node = self.objects[value] = self.graph.get_attr(attribute)
            node.meta = NodeMeta({"val": value})
        return node

    def _node(self, entry: Entry) -> fx.Node:
        return self.nodes[entry]

    def _meta(self, entry: Entry) -> NodeMeta:
        late = _LateMeta(self.fake_mode, entry.spec)
        meta = NodeMeta({"spec": entry.spec}, late=late)
        if entry in self.numbers:
            meta["val"] = self.numbers[entry]
        if entry.target is None:
            return meta
        meta["partitioner_tag"] = "is_backward" if entry.is_backward else "is_forward"
        meta["original_aten"] = _original(entry)
        if entry.once:
            meta["runs_once"] = True
        forward = ""
        if entry.is_backward:
            meta["autograd_backward"] = True
            forward = "fwd_"
        if entry.sequence_nr is not None:
            meta["seq_nr"] = entry.sequence_nr
        if entry.recompute is not None:
            meta["recompute"], meta["ac_graph_id"] = entry.recompute.policy, entry.recompute.region
        if entry in self.tape.meta:
            meta |= self.tape.meta[entry]
        origin = entry.origin
        if origin is None and entry.sequence_nr is not None:
            origin = self.tape.origins.get(entry.sequence_nr)
        if origin is not None:
            late.origin, late.modules_key = origin, _MODULES[entry.is_backward]
            if origin.marked_call:
                meta["marked_call"] = origin.marked_call
            if origin.custom:
                meta["custom"] = dict(origin.custom)
            if origin.metadata is not None:
                meta |= {k if k in _EVERYWHERE else forward + k: v for k, v in origin.metadata.items()}
            is_sum = entry.is_backward and entry.target is torch.ops.aten.add.Tensor
            if is_sum and all(isinstance(argument, Entry) for argument in entry.args):
                late.prefix = _ACCUMULATION
                meta["is_gradient_acc"] = True
                meta.pop("custom", None)
        return meta


_EVERYWHERE = {"from_node", "custom"}
_MODULES = ("nn_module_stack", "fwd_nn_module_stack")  # of the forward, of the backward
_ACCUMULATION = "Gradient accumulation (a value is used more than once), or backward of:\n"


class _LateMeta(Mapping[str, Callable[[], Any]]):
    """A node's late metadata, by key: in one small object, as a graph has one for each node."""

    __slots__ = ("fake_mode", "modules_key", "origin", "prefix", "spec")

    def __init__(self, fake_mode: FakeTensorMode, spec: Any) -> None:
        self.fake_mode, self.spec = fake_mode, spec
        self.origin: Origin | None = None
        self.modules_key, self.prefix = _MODULES[0], ""

    def __contains__(self, key: object) -> bool:
        origin = self.origin
        if key == "val" or origin is None:
            return key == "val"
        if key == "stack_trace":
            return bool(self.prefix or origin.frames)
        return key == self.modules_key and origin.metadata is None and bool(origin.modules)

    def __getitem__(self, key: str) -> Callable[[], Any]:
        if key not in self:
            raise KeyError(key)
        return {"val": self._value, "stack_trace": self._stack_trace}.get(key, self._modules)

    def __iter__(self) -> Iterator[str]:
        return (key for key in ("val", "stack_trace", self.modules_key) if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _value(self) -> Any:
        return fake_of(self.fake_mode, self.spec)

    def _stack_trace(self) -> str:
        assert self.origin is not None
        return self.prefix + self.origin.text()

    def _modules(self) -> dict[str, object]:
        assert self.origin is not None
        return {str(i): item for i, item in enumerate(self.origin.modules)}


# Objects that the graph's module holds, and how their attributes are called: graphs by their class.
_OBJECTS: dict[type, str] = {torch.Generator: "_generator", torch.ScriptObject: "_torchbind_obj", fx.GraphModule: ""}
_OBJECTS |= {cls: "_opaque_obj" for cls in OPAQUE if cls not in _OBJECTS}


@functools.cache
def _takes_objects(target: object) -> bool:
    names = [str(argument.type) for argument in getattr(getattr(target, "_schema", None), "arguments", ())]
    return is_higher_order(target) or any("Generator" in n or n.startswith(("__torch__", "PyObject")) for n in names)


def _original(entry: Entry) -> Any:
    """The operator that an entry comes from, before decompositions."""
    if entry.target is operator.getitem and isinstance(entry.args[0], Entry):
        return _original(entry.args[0])
    return entry.original or entry.target


def fake_of(mode: FakeTensorMode, spec: Any) -> Any:
    """A fake tensor of the layout; a tuple of fakes for several."""
    if isinstance(spec, TensorSpec):
        fake: Any = new_fake(mode, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        if spec.conj:
            fake = mode.dispatch(torch.ops.aten._conj.default, (), (fake,), {})
        if spec.neg:
            fake = mode.dispatch(torch.ops.aten._neg_view.default, (), (fake,), {})
        return fake
    if isinstance(spec, (tuple, list)):
        return tuple(fake_of(mode, item) for item in spec)
    return None


def _name(target: object) -> str:
    packet = getattr(target, "overloadpacket", None)
    raw = packet.__name__ if packet is not None else getattr(target, "__name__", "op")
    return str(raw).strip("_") or "op"


# -------------------------------------------------------------------- sizes
# How the graph computes with symbolic sizes: read off its inputs.


def symbols_of_inputs(inputs: Sequence[Entry], numbers: Mapping[Entry, object]) -> tuple[SizeSymbol, ...]:
    """Where each symbol is found: the first dimension of an input that is one, or the input that is that number.

    `numbers` has the symbolic numbers that inputs are, by entry.
    """
    found: dict[object, SizeSymbol] = {}
    for position, entry in enumerate(inputs):
        sizes: list[tuple[int | None, object]] = []
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
    """The nodes of a graph that compute with sizes, read off the graph's `inputs`."""

    def __init__(
        self, graph: fx.Graph, inputs: Sequence[Entry], nodes: Mapping[Entry, fx.Node], numbers: Mapping[Entry, object]
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
            whole = self._of_sizes(expression)
            for symbol in sorted(whole.free_symbols, key=str):
                if symbol not in self.symbols:
                    self.symbols[symbol] = self._size(symbol)
            self.written[expression] = write_expression(self.graph, number, self.symbols, whole)
        return self.written[expression]

    def _of_sizes(self, expression: Any) -> Any:
        """An expression in sizes of inputs, where it has symbols that are no size: inputs may be parts of tensors."""
        if all(symbol in self.symbols or symbol in self.places for symbol in expression.free_symbols):
            return expression
        for position, entry in enumerate(self.inputs):
            for dim, size in enumerate(entry.spec.shape if isinstance(entry.spec, TensorSpec) else ()):
                if isinstance(size, torch.SymInt) and symbol_of(size) is None:
                    expression, symbol = with_part_named(expression, size, f"{position}_{dim}")
                    self.places.setdefault(symbol, SizeSymbol(symbol, position, dim))
        return expression

    def define(self, number: object, node: fx.Node) -> None:
        """`node` computes this symbolic number."""
        self.symbols.setdefault(symbol_made(number), node)

    def _size(self, symbol: object) -> fx.Node:
        place = self.places.get(symbol)
        if place is None:
            raise UnsupportedError(
                f"a derivative needs the size {symbol}, and none of its inputs has it. Compile with dynamic=False."
            )
        entry, dim = self.inputs[place.input], place.dim
        placeholder = self.nodes[entry]
        if dim is None:
            return placeholder
        node = self.graph.create_node("call_function", aten.sym_size.int, (placeholder, dim), {}, f"size_{symbol}")
        node.meta = NodeMeta({"val": entry.tensor.shape[dim], "partitioner_tag": "is_forward"})
        return node
