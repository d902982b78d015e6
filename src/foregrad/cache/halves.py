"""Forward and backward of a joint graph as data, to be read beside an equal joint graph in another process.

Nothing of the joint graph is kept twice: constants are named, symbols of sizes are the joint graph's own, and the
origin of a node (its line, module, operator) is that of the node it is `like`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.expressions import raw_expression
from .._torch.symbols import SymbolTable, is_symbolic
from ..graph.joint import JointGraph
from ..graph.meta import NodeMeta, spec_of
from ..graph.role import PREPARED
from ..identity import ById
from ..partitioners.budget import Outcome
from ..partitioners.uniform import Proof
from ..serialize.graphs import first_sequence_nr, graph_from, graph_to
from ..serialize.values import Reader, Writer, checked
from .describe import UndescribedError

_BUDGET = "memory_budget"  # of a forward's `meta`, see `partitioners.budget`
_KNOWN = {_BUDGET, PREPARED}
_MORE = {
    "has_backward_hook": bool,
    "saved_tensor_with_no_vc_check": bool,
    "updated": bool,
    "marked_call": int,
}
_OWN = ("val", "spec", "tensor_meta")  # entries of a node that are never taken from the node it is like


def constants_of(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The constant tensors of a graph, by attribute name. Raises `UndescribedError` for constants of another type."""
    constants = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            value = getattr(module, name) if "." not in name else None
            if type(value) is not torch.Tensor:
                raise UndescribedError(f"the attribute {name} of a graph")
            constants[name] = value
    return constants


def symbols_of(joint: JointGraph) -> dict[str, Any]:
    """The symbols of a joint graph's sizes and numbers, by their names."""
    table = joint.symbols
    symbols = set() if table is None else {*table.bound, *table.computed}
    numbers = (node.meta.get("val") for node in joint.graph.nodes if spec_of(node) is None)
    symbols |= {symbol for n in numbers if is_symbolic(n) for symbol in raw_expression(n).free_symbols}
    return {str(symbol): symbol for symbol in symbols}


def _table_of(joint: JointGraph) -> SymbolTable | None:
    """The table of the graph's symbols, made here for a graph whose only symbols are floats that it reads."""
    numbers = (node.meta.get("val") for node in joint.graph.nodes if spec_of(node) is None)
    own = (SymbolTable(n.node.shape_env) for n in numbers if is_symbolic(n))
    return joint.symbols or next(own, None)


def _namer(constants: Mapping[str, torch.Tensor]) -> Callable[[Any], str]:
    names = ById((tensor, name) for name, tensor in constants.items())

    def name_of(tensor: Any) -> str:
        if tensor not in names:
            raise UndescribedError("a constant that a pass made")
        return names[tensor]

    return name_of


def data_of(module: fx.GraphModule, details: Callable[[fx.Node], dict[str, Any]]) -> dict[str, Any]:
    """One graph as data, with its tables, for a key."""
    writer = Writer(symbolic_floats=True)
    flags_of(_output(module))  # raises for descriptors, which the data would leave out
    graph = graph_to(module, writer, _namer(constants_of(module)), details)
    return graph | {"tables": writer.tables()}


def halves_to(halves: Sequence[fx.GraphModule], joint: JointGraph) -> dict[str, Any]:
    """The halves as data. Raises `UndescribedError` or `ArtifactError` for halves that can't be data."""
    writer, constants = Writer(symbolic_floats=True), constants_of(joint.module)
    writer.first_sequence_nr = first_sequence_nr(joint.module)
    like = _Likes(joint)
    graphs = []
    for half in halves:
        if set(half.meta) - _KNOWN:
            raise UndescribedError(f"a half with {sorted(set(half.meta) - _KNOWN)}")
        _check(half)
        for name, value in constants_of(half).items():
            if constants.get(name) is not value:
                raise UndescribedError("a constant that a pass made or renamed")
        graph = graph_to(half, writer, _namer(constants), like.details)
        graphs.append(graph | {"returns": "tuple" if isinstance(_results(half), tuple) else "list"})
    outcome = halves[0].meta.get(_BUDGET)
    content = {"graphs": graphs, "tables": writer.tables(), "prepared": PREPARED in halves[0].meta}
    return content if outcome is None else content | {"budget": dataclasses.asdict(outcome)}


def halves_from(data: Any, joint: JointGraph, names: Sequence[str]) -> list[fx.GraphModule]:
    """The halves from the data of `halves_to`, for an equal joint graph. Raises for any other data."""
    reader = Reader(data["tables"], _table_of(joint), symbols_of(joint), symbolic_floats=True)
    constants = constants_of(joint.module)
    origins, first = {node.name: node for node in joint.graph.nodes}, first_sequence_nr(joint.module)
    halves = []
    for entry, name in zip(data["graphs"], names, strict=True):
        half = graph_from(entry, reader, constants, joint.fake_mode, name, attributes=lambda key, _: key)
        for node, item in zip(half.graph.nodes, entry["nodes"], strict=True):
            _restore(node, item, origins, first)
        if entry["returns"] == "tuple":  # compilers' own keys contain the text of a graph
            _output(half).args = (tuple(_results(half)),)
        half.meta |= {PREPARED: True} if checked(data["prepared"], bool) else {}
        halves.append(half)
    if "budget" in data:
        proof = data["budget"].pop("proof")
        halves[0].meta[_BUDGET] = Outcome(**data["budget"], proof=None if proof is None else Proof(**proof))
    return halves


def _output(module: fx.GraphModule) -> fx.Node:
    output: fx.Node = next(iter(reversed(module.graph.nodes)))
    return output


def _results(module: fx.GraphModule) -> Any:
    return _output(module).args[0]


def _check(half: fx.GraphModule) -> None:
    """Raise `UndescribedError` for values that a graph's data leaves out."""
    for node in half.graph.nodes:
        if node.op not in ("placeholder", "call_function") or spec_of(node) is not None:
            continue
        value = node.meta.get("val")
        if value is not None and type(value) is not int and not is_symbolic(value):
            raise UndescribedError(f"a value that is a {type(value).__name__}")


class _Likes:
    """For each node of a half, a node of the joint graph with the same origin."""

    def __init__(self, joint: JointGraph) -> None:
        self.by_name = {node.name: node for node in joint.graph.nodes}
        self.by_trace: dict[Any, str] = {}
        for node in joint.graph.nodes:
            self.by_trace.setdefault(node.meta.get("stack_trace"), node.name)

    def details(self, node: fx.Node) -> dict[str, Any]:
        details = flags_of(node)
        trace = node.meta.get("stack_trace")
        same = self.by_name.get(node.name)
        if same is not None and same.meta.get("stack_trace") == trace:
            details["like"] = node.name
        elif trace in self.by_trace:
            details["like"] = self.by_trace[trace]
        return details


def flags_of(node: fx.Node) -> dict[str, Any]:
    """Metadata that partitioners and reports read of a node, besides that in every graph's data."""
    if dict.get(node.meta, "desc") is not None:
        raise UndescribedError("descriptors on a node")
    flags: dict[str, Any] = {}
    for key, cls in _MORE.items():
        value = dict.get(node.meta, key)
        if type(value) is cls:
            flags[key] = value
    names = dict.get(node.meta, "checkpoint_names")
    if names:
        flags["checkpoint_names"] = [checked(name, str) for name in names]
    return flags


_OF_ENTRY = ("partitioner_tag", "autograd_backward", "seq_nr", "is_gradient_acc", "ac_graph_id", "recompute")


def _restore(node: fx.Node, item: Mapping[str, Any], origins: Mapping[str, fx.Node], first_sequence_nr: int) -> None:
    origin = origins.get(item.get("like", ""))
    if node.op == "output" or not isinstance(node.meta, NodeMeta):
        return
    for key, cls in _MORE.items():
        if key in item:
            node.meta[key] = checked(item[key], cls)
    if "seq_nr" in item:
        node.meta["seq_nr"] = first_sequence_nr + item["seq_nr"]
    if "checkpoint_names" in item:
        node.meta["checkpoint_names"] = tuple(checked(name, str) for name in item["checkpoint_names"])
    if origin is None or not isinstance(origin.meta, NodeMeta):
        return
    own = {*_OWN, *_OF_ENTRY, *_MORE, "checkpoint_names"}
    for key, value in dict.items(origin.meta):
        if key not in own:
            dict.setdefault(node.meta, key, value)
    more = {key: make for key, make in origin.meta._late.items() if key not in own and key not in node.meta}
    node.meta._late = {**node.meta._late, **more}
