"""`foregrad inspect FILE`: what an artifact holds, without loading its tensors."""

from __future__ import annotations

import argparse
import collections
import os
import sys
from typing import Any

import torch

from foregrad.artifacts.container import TENSORS, opened
from foregrad.artifacts.program import Specialization, specialization_from
from foregrad.artifacts.records import Stored
from foregrad.cli.screen import add_json, print_json
from foregrad.errors import ArtifactError
from foregrad.graph.printing import print_graph, shortened
from foregrad.graph.source import shown
from foregrad.partitioners import in_bytes
from foregrad.serialize.values import Reader, checked

_MOST_TENSORS = 40


def add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "inspect",
        help="what is inside an artifact that `foregrad.export(...).save(path)` wrote",
        description="Prints versions, tensors and specializations of an artifact: calls, results, guards, operators. "
        "The checksum of the file is checked, no tensor is loaded. Exit status: 0, 1 no artifact or a damaged one.",
        epilog="example: foregrad inspect model.fg --graph joint",
    )
    parser.add_argument("file", help="the artifact")
    parser.add_argument("--graph", choices=("joint", "forward", "backward"), help="print these graphs as Python, too")
    parser.add_argument("--all", action="store_true", help="list every tensor and operator")
    add_json(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(options: argparse.Namespace) -> int:
    """Run the command; 0 for an artifact, 1 for any other file."""
    try:
        artifact = describe(options.file, graph=options.graph)
    except (ArtifactError, OSError) as error:
        print(f"foregrad inspect: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json(artifact)
        return 0
    versions = f"by foregrad {shown(artifact['foregrad'])}, PyTorch {shown(artifact['torch'])}"
    print(f"{shown(artifact['name'])}: version {artifact['version']} of the format, {versions}")
    kinds = collections.Counter(tensor["kind"] for tensor in artifact["tensors"])
    sizes = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.items())
    print(f"{len(artifact['tensors'])} tensors ({sizes or 'none'}), {in_bytes(artifact['tensor_bytes'])}")
    listed = artifact["tensors"] if options.all else artifact["tensors"][:_MOST_TENSORS]
    for tensor in listed:
        grad = "  requires grad" if tensor["requires_grad"] else ""
        names = f"  also {', '.join(tensor['aliases'])}" if tensor["aliases"] else ""
        print(f"  {tensor['kind']} {shown(tensor['name'])}: {tensor['layout']}{grad}{shown(names)}")
    if len(listed) < len(artifact["tensors"]):
        print(f"  ... and {len(artifact['tensors']) - len(listed)} more (--all)")
    for specialization in artifact["specializations"]:
        _print(specialization, every=options.all)
    return 0


def _print(specialization: dict[str, Any], *, every: bool) -> None:
    print(f"\nspecialization: {shown(specialization['name'])}")
    for title, lines in specialization["sections"].items():
        print(f"  {title}:")
        for line in lines if every else lines[:_MOST_TENSORS]:
            print(f"    {shown(line)}")
        if not every and len(lines) > _MOST_TENSORS:
            print(f"    ... and {len(lines) - _MOST_TENSORS} more (--all)")
    if specialization["graph"]:
        print(f"\n{specialization['graph']}")


# -------------------------------------------------------------------- contents
# The contents of an artifact's file, for people: read without its tensors.


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


def _graph(specialization: Specialization, graph: str | None) -> str:
    if graph is None:
        return ""
    if graph == "joint":
        return str(specialization.joint)
    module = specialization.forward if graph == "forward" else specialization.backward
    slots = specialization.joint.slot_texts()
    return print_graph(shortened(module), header=f"{graph} of {specialization.joint.name}", slots=slots, name=graph)


def _sections(specialization: Specialization) -> dict[str, list[str]]:
    signature, program = specialization.signature, specialization.program
    arguments = [
        f"{info.slot}: {info.spec}{'  requires grad' if info.requires_grad else ''}"
        for info in signature.inputs
        if not isinstance(info.source, Stored)
    ]
    values = [f"{leaf.path} = {leaf.value!r}" for leaf in specialization.call.leaves if not leaf.is_tensor]
    results = [str(getattr(info, "path", info)) for info in signature.outputs]
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
    decisions = [f"{decision.value!r} at {decision.where}" for decision in signature.decisions]
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
