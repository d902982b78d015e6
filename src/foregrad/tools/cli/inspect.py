"""`foregrad inspect FILE`: an artifact's contents, without loading its tensors."""

from __future__ import annotations

import argparse
import collections
import os
import sys
from typing import Any

from foregrad.errors import ArtifactError
from foregrad.graph.source import shown
from foregrad.partitioners import in_bytes
from foregrad.store.artifacts.contents import describe

from .screen import add_json, print_json

_MOST_TENSORS = 40


def add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "inspect",
        help="the contents of an artifact that `foregrad.export(...).save(path)` wrote",
        description="Prints versions, tensors and specializations of an artifact: calls, results, guards, operators. "
        "The checksum of the file is checked, no tensor is loaded. Exit status: 0, 1 no artifact or a damaged one, "
        "2 no such file.",
        epilog="example: foregrad inspect model.fg --graph joint",
    )
    parser.add_argument("file", help="the artifact")
    parser.add_argument("--graph", choices=("joint", "forward", "backward"), help="print these graphs as Python, too")
    parser.add_argument("--all", action="store_true", help="list every tensor and operator")
    add_json(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(options: argparse.Namespace) -> int:
    """Run the command; 0 for an artifact, 1 for any other file, 2 for none."""
    try:
        artifact = describe(options.file, graph=options.graph)
    except (ArtifactError, OSError) as error:
        print(f"foregrad inspect: {error}", file=sys.stderr)
        return 1 if os.path.exists(options.file) else 2
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
