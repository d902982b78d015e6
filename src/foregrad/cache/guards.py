"""The guards of a capture as JSON: on arguments, on state that was read, on sizes, on settings."""

from __future__ import annotations

import json
from typing import Any

import torch

from .._torch.expressions import table_to
from ..frontend.call import FlatCall
from ..frontend.reads import Reads
from ..graph.joint import JointGraph
from .describe import UndescribedError, describe


def described_guards(call: FlatCall, reads: Reads, facts: Any) -> dict[str, Any]:
    """The guards of a captured call that mean something in another process.

    Guards also cover all globals that some code names, an identifier of this session in some library among them. These
    are left out: their influence on the graph is in the graph.
    """
    leaves = [
        [path, first, _leaf(leaf, is_open=index in call.numbers)]
        for index, (path, first, leaf) in enumerate(zip(call.paths, call.first_of, call.leaves, strict=True))
    ]
    return {
        "call": leaves,
        "tree": describe(call.tree, lenient=True),
        "dynamic": describe(dict(call.dynamic), lenient=True),
        "state": sorted(filter(None, map(_state, reads.places.values())), key=json.dumps),
        "facts": describe(tuple(facts), lenient=True),
    }


def _leaf(leaf: Any, *, is_open: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        return None
    if is_open and type(leaf) is int:
        return ["any", "int"]  # a symbol, whose conditions are in the key
    return describe(leaf, lenient=True)


def _state(place: Any) -> Any:
    """Plain values in a closure, in defaults and in attributes of objects and modules."""
    if place.kind != "object" and place.owner is None:
        return None
    items = [
        [place.path(key), describe(expected.value, lenient=True)]
        for key, expected in place.items.items()
        if expected.kind == "equal"
    ]
    return sorted(items, key=json.dumps)


def described_sizes(joint: JointGraph, *, at_capture: bool) -> Any:
    """The symbols of a graph's sizes with their conditions; None without symbols.

    `at_capture`: also their values at capture.
    """
    if joint.symbols is None:
        return None
    try:
        table = table_to(joint.symbols, floats=True)
    except ValueError as error:
        raise UndescribedError(str(error)) from None
    if not at_capture:
        for symbol in table["symbols"]:
            del symbol["hint"]
    return table
