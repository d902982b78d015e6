"""Collectives inside a captured graph, as DTensor puts them there: their ranks, bytes and seconds.

The operator that reads the result waits, so that the time is added to the operators'; the collectives of `fully_shard`
run beside the operators, see `ranks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import fx

from ..errors import PlanError
from ..graph.joint import JointGraph
from ..graph.meta import value_of
from ..partitioners import value_bytes
from ._torch import ranks_in
from .devices import Device

_SPACES = ("_c10d_functional", "_c10d_functional_autograd")
_SENT = {"all_gather": "result", "reduce_scatter": "operand", "all_to_all": "operand", "broadcast": "operand"}


@dataclasses.dataclass(frozen=True, slots=True)
class InGraph:
    """A collective: its name, how many ranks take part, whether on one host, and the bytes that a rank sends."""

    name: str
    ranks: int
    inside: bool
    sent: int

    def seconds(self, device: Device) -> float:
        """By the slowest link between the ranks."""
        speed = device.link if self.inside and device.link else device.network
        return self.sent / (speed * device.shares.link)


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective; its result is its operand."""
    return _name(node) == "wait_tensor"


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.partition("::")[2] if getattr(target, "namespace", "") in _SPACES else ""


def collective_of(node: fx.Node, host: int) -> InGraph | None:
    """The collective that a node is, on hosts of so many ranks; None for any other operator."""
    name = _name(node)
    if not name or is_wait(node):
        return None
    groups = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, str)]
    try:
        members = ranks_in(groups[-1])
    except RuntimeError as error:
        raise PlanError(
            f"the model communicates in a process group ({groups[-1]!r}) that is not there: plan it where its mesh was "
            "made, inside of `with foregrad.planning.fake_ranks(...)`"
        ) from error
    count = len(members)
    operand = sum(value_bytes(value_of(one)) for one in node.all_input_nodes)
    result = value_bytes(value_of(node))
    if name.startswith("all_reduce"):  # into shards, then a gather of the shards
        sent = 2 * operand * (count - 1) // count
    else:
        of = next((side for start, side in _SENT.items() if name.startswith(start)), "operand")
        sent = (result if of == "result" else operand) * (count - 1) // max(1, count)
    return InGraph(name, count, len({rank // host for rank in members}) == 1, sent)


def forget_waits(joint: JointGraph) -> None:
    """Take the waits out of a graph that does not run: a wait gives the memory that it takes."""
    waits = [node for node in joint.graph.nodes if is_wait(node)]
    for node in waits:
        node.replace_all_uses_with(node.all_input_nodes[0])
        joint.graph.erase_node(node)


def summed(found: Iterable[tuple[InGraph, float]]) -> list[tuple[str, int, int, float]]:
    """(name, count, bytes sent, seconds) of collectives by name and ranks."""
    sums: dict[tuple[str, int], list[float]] = {}
    for one, seconds in found:
        entry = sums.setdefault((one.name, one.ranks), [0, 0, 0.0])
        entry[0] += 1
        entry[1] += one.sent
        entry[2] += seconds
    return [
        (f"{name.replace('_', ' ')} in the graph, {ranks} ranks", int(entry[0]), int(entry[1]), entry[2])
        for (name, ranks), entry in sums.items()
    ]
