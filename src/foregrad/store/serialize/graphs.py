"""fx graphs as data and back.

A graph is the list of its nodes, and each refers only to nodes before it: there are no cycles. Constants are named and
kept beside the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..._torch.fakes import FakeTensorMode
from ..._torch.graphs import GraphWriter, make_graph_module
from ..._torch.symbols import is_symbolic
from ...errors import ArtifactError
from ...graph.meta import NodeMeta, TensorSpec, spec_of
from ...graph.printing import last_frame
from ...graph.source import is_name
from ...tracing.tape.graph import fake_of
from .values import Reader, Writer, checked

_OPS = ("placeholder", "get_attr", "call_function", "output")
# Metadata that passes and printing read of a node, besides its layout and line.
_FLAGS = {"partitioner_tag": str, "autograd_backward": bool, "seq_nr": int, "is_gradient_acc": bool, "ac_graph_id": int}
_FLAGS |= {"runs_once": bool}
_LONGEST_LINE = 400
_MOST_NODES = 2_000_000


def graph_to(
    module: fx.GraphModule,
    writer: Writer,
    constant: Callable[[Any], str],
    details: Callable[[fx.Node], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The graph as data; `constant` gives the name under which a tensor of the module is kept.

    `details`: gives further data of a node, in place of its line. Raises `ArtifactError` if a graph can't be data.
    """
    nodes = list(module.graph.nodes)
    writer.nodes = {node: number for number, node in enumerate(nodes)}
    if writer.first_sequence_nr is None:
        writer.first_sequence_nr = first_sequence_nr(module)
    return {"nodes": [_node_to(node, module, writer, constant, details or _line_of(writer)) for node in nodes]}


def first_sequence_nr(module: fx.GraphModule) -> int:
    """The least sequence number of autograd's in a graph: autograd counts anew in each process."""
    numbers = (dict.get(node.meta, "seq_nr") for node in module.graph.nodes)
    return min((number for number in numbers if type(number) is int), default=0)


def _node_to(
    node: fx.Node,
    module: fx.GraphModule,
    writer: Writer,
    constant: Callable[[Any], str],
    details: Callable[[fx.Node], dict[str, Any]],
) -> dict[str, Any]:
    data: dict[str, Any] = {"op": node.op}
    if node.op == "output":
        results: Any = node.args[0]
        return data | {"results": [writer.value(value) for value in results]}
    if node.op not in _OPS:
        raise ArtifactError(f"an artifact can't hold a node that is a {node.op}")
    data["name"] = node.name
    if node.op == "get_attr":
        value = _attribute(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise ArtifactError(
                "an artifact can't hold a random generator of the program's own: draw from the default generator"
                if isinstance(value, torch.Generator)
                else f"an artifact can't hold {type(value).__name__} as a part of a graph (`{node.target}`)"
            )
        data["constant"] = constant(value)
    elif node.op == "call_function":
        data["call"] = writer.operator(node.target)
        if node.args:
            data["args"] = [writer.value(argument) for argument in node.args]
        if node.kwargs:
            data["kwargs"] = [[name, writer.value(argument)] for name, argument in node.kwargs.items()]
    return data | _meta_to(node, writer) | details(node)


def _attribute(module: Any, target: str) -> Any:
    for name in target.split("."):
        module = getattr(module, name)
    return module


def _meta_to(node: fx.Node, writer: Writer) -> dict[str, Any]:
    data: dict[str, Any] = {}
    layouts = writer.layouts_of(spec_of(node))
    if layouts is not None:
        data["layout"] = layouts
    else:
        value = dict.get(node.meta, "val")
        if type(value) is int or is_symbolic(value):
            data["number"] = writer.number(value)
    for key, cls in _FLAGS.items():
        value = dict.get(node.meta, key)
        if type(value) is cls:
            data[key] = value
    if "seq_nr" in data:
        data["seq_nr"] -= writer.first_sequence_nr
    policy = dict.get(node.meta, "recompute")
    if policy is not None:
        data["recompute"] = int(policy.value)
    return data


def _line_of(writer: Writer) -> Callable[[fx.Node], dict[str, Any]]:
    def line_of(node: fx.Node) -> dict[str, Any]:
        trace = node.meta.get("stack_trace")
        frame = last_frame(trace) if isinstance(trace, str) else None
        if frame is None:
            return {}
        file, number, function, code = frame
        return {"line": writer.line(f'  File "{file}", line {number}, in {function}\n    {code}'[:_LONGEST_LINE])}

    return line_of


# ------------------------------------------------------------------------------------------------------ reading


def graph_from(
    data: Any,
    reader: Reader,
    constants: Mapping[str, torch.Tensor],
    mode: FakeTensorMode,
    name: str,
    *,
    attributes: Callable[[str, int], str] = lambda key, number: f"_tensor_constant{number}",
) -> fx.GraphModule:
    """The graph from the data of `graph_to`. `attributes`: names the module's attribute for a constant, from the
    constant's name and number.
    """
    nodes = checked(data["nodes"], list)
    if not 0 < len(nodes) <= _MOST_NODES:
        raise ArtifactError(f"a graph of {len(nodes)} nodes")
    writer, root = GraphWriter(), torch.nn.Module()
    reader.nodes = []
    names: set[str] = set()
    for number, entry in enumerate(nodes):
        op = entry["op"]
        if (op == "output") != (number == len(nodes) - 1) or op not in _OPS:
            raise ArtifactError(f"node {number} of {len(nodes)} is a {str(op)[:40]!r}")
        if op == "output":
            writer.graph.output(checked(reader.value(entry["results"]), list))
            break
        node_name = entry["name"]
        if not is_name(node_name) or node_name in names or len(node_name) > 200:
            raise ArtifactError(f"node {number} has no name of its own: {str(node_name)[:80]!r}")
        names.add(node_name)
        reader.nodes.append(_node_from(entry, node_name, reader, constants, mode, writer, root, attributes))
    return make_graph_module(root, writer.graph, name)


def _node_from(
    entry: Any,
    name: str,
    reader: Reader,
    constants: Mapping[str, torch.Tensor],
    mode: FakeTensorMode,
    writer: GraphWriter,
    root: torch.nn.Module,
    attributes: Callable[[str, int], str],
) -> fx.Node:
    meta = _meta_from(entry, reader, mode)
    op = entry["op"]
    if op == "placeholder":
        return writer.add(name, op, name, (), {}, meta)
    if op == "get_attr":
        key = checked(entry["constant"], str)
        if key not in constants:
            raise ArtifactError(f"there is no constant {key[:80]!r}")
        tensor = constants[key]
        spec = dict.get(meta, "spec")
        if not isinstance(spec, TensorSpec) or (tensor.shape, tensor.dtype) != (spec.shape, spec.dtype):
            raise ArtifactError(f"the constant {key[:80]!r} has a layout that differs from the graph's")
        attribute = attributes(key, len(root._buffers))
        if attribute not in root._buffers:
            root.register_buffer(attribute, tensor, persistent=False)
        return writer.add(name, op, attribute, (), {}, meta)
    args = tuple(reader.value(argument) for argument in checked(entry.get("args", []), list))
    kwargs: dict[str, Any] = {}
    for key, argument in checked(entry.get("kwargs", []), list):
        if not is_name(key) or key in kwargs:
            raise ArtifactError(f"{str(key)[:80]!r} is no name of an argument")
        kwargs[key] = reader.value(argument)
    return writer.add(name, op, reader.operator(entry["call"]), args, kwargs, meta)


def _meta_from(entry: Any, reader: Reader, mode: FakeTensorMode) -> NodeMeta:
    if "number" in entry:
        meta = NodeMeta({"val": reader.number(entry["number"]), "spec": None})
    else:
        spec = reader.layouts_of(entry.get("layout"))
        meta = NodeMeta({"spec": spec}, late={"val": lambda: fake_of(mode, spec)})
    for key, cls in _FLAGS.items():
        if key in entry:
            meta[key] = checked(entry[key], cls)
    if "recompute" in entry:
        meta["recompute"] = CheckpointPolicy(checked(entry["recompute"], int))
    if "line" in entry:
        lines, number = reader.lines, checked(entry["line"], int)
        if not 0 <= number < len(lines):
            raise ArtifactError("a node comes from no line")
        meta["stack_trace"] = lines[number]
    return meta
