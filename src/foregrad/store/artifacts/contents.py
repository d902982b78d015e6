"""The contents of an artifact's file, for people: read without its tensors."""

from __future__ import annotations

import collections
import os
from typing import Any

import torch

from ...graph.printing import print_graph
from ...graph.role import outlined
from ..serialize.values import Reader, checked
from .container import TENSORS, opened
from .program import StoredSpecialization, specialization_from
from .records import Stored


def describe(path: str | os.PathLike[str], *, graph: str | None = None) -> dict[str, Any]:
    """The contents of the artifact at `path`, all but the values of its tensors, as JSON.

    Raises `ArtifactError` if it is no artifact, or damaged.
    """
    with opened(os.fspath(path)) as contents:
        manifest = contents.manifest
        reader = Reader({"operators": [], "lines": [], "layouts": manifest["layouts"]})
        tensors, constants = [], {}
        for item in manifest["tensors"]:
            spec = reader.layout(item["layout"])
            name, kind = checked(item["name"], str), checked(item["kind"], str)
            aliases = tuple(checked(alias, str) for alias in item.get("aliases", ()))
            described = {"name": name, "kind": kind, "layout": repr(spec)}
            tensors.append({**described, "requires_grad": item.get("requires_grad", False), "aliases": aliases})
            if kind == "constant":  # only its layout is read
                constants[name] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        specializations = []
        for number in range(len(manifest["specializations"])):
            specialization = specialization_from(contents.json(f"programs/{number}.json"), constants)
            sections, text = _sections(specialization), _graph(specialization, graph)
            specializations.append({"name": specialization.name, "sections": sections, "graph": text})
        return {
            **{key: checked(manifest[key], str) for key in ("name", "foregrad", "torch")},
            "version": manifest["version"],
            "tensors": tensors,
            "tensor_bytes": checked(manifest["members"][TENSORS]["bytes"], int),
            "specializations": specializations,
        }


def _graph(specialization: StoredSpecialization, graph: str | None) -> str:
    if graph is None:
        return ""
    if graph == "joint":
        return str(specialization.joint)
    module = specialization.forward if graph == "forward" else specialization.backward
    slots = specialization.joint.slot_texts()
    return print_graph(
        outlined(module, to_read=True), header=f"{graph} of {specialization.joint.name}", slots=slots, name=graph
    )


def _sections(specialization: StoredSpecialization) -> dict[str, list[str]]:
    signature, program = specialization.signature, specialization.program
    arguments = [
        f"{info.slot}: {info.spec}{'  requires grad' if info.requires_grad else ''}"
        for info in signature.inputs
        if not isinstance(info.source, Stored)
    ]
    values = [f"{leaf.path} = {leaf.value!r}" for leaf in specialization.call.leaves if not leaf.is_tensor]
    results = [str(getattr(info, "path", info)) for info in signature.structure.outputs]
    written = [str(signature.inputs[update.input].slot) for update in signature.updates]
    graphs = [
        f"joint: {len(specialization.joint.graph.nodes)} nodes",
        f"forward: {len(specialization.forward.graph.nodes)} nodes, {program.partitioned.saved_bytes} bytes saved",
        f"backward: {len(specialization.backward.graph.nodes)} nodes",
    ]
    calls = (n.target for n in specialization.joint.graph.nodes if n.op == "call_function")
    operators = collections.Counter(_name(target) for target in calls)
    table = specialization.joint.symbols
    sizes = [
        f"{info.symbol}: size {info.dim} of {signature.inputs[info.input].slot}, from {_range(table, info.symbol)}"
        for info in signature.symbols
    ]
    guards = [str(guard) for guard in table.guards()] if table is not None else []
    context = [f"{name}: {value}" for name, value in sorted(specialization.context.items())]
    mode = [] if specialization.training is None else [f"training: {specialization.training}"]
    decisions = [f"{decision.value!r} at {decision.where}" for decision in signature.stops.decisions]
    sections = (
        ("arguments", [*arguments, *values]),
        ("results", results),
        ("writes to", written),
        ("graphs", graphs),
        ("can be differentiated", [f"{program.order()} times"]),
        ("sizes that may vary", sizes),
        ("conditions on sizes", guards),
        ("values that it is right for", decisions),
        ("called under", [*mode, *context]),
        ("operators", [f"{count:5} {name}" for name, count in operators.most_common()]),
    )
    return {title: lines for title, lines in sections if lines}


def _range(table: Any, symbol: Any) -> str:
    least, most = table.limits(symbol)
    return f"{least} to {'any' if most is None else most}"


def _name(target: Any) -> str:
    name = getattr(target, "name", None)
    return str(name()) if callable(name) else str(getattr(target, "__name__", target))
