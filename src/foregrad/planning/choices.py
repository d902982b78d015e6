"""The choices beside one another: ways to split one graph, each with its memory, repeated work and time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from .. import api
from ..annexes import the_one
from ..errors import BudgetError, PartitionError
from ..graph.joint import JointGraph, Partitioned
from ..graph.meta import TensorSpec, value_of
from ..partitioners import JointIndex, Kind, is_offloaded, kind_of, merge_equal, split, value_bytes
from ..partitioners.policies import Policy, everything_saveable, nothing_saveable
from .memory import StepMemory
from .work import Layers, OperatorCost

NAMES = {"save all", "min cut", "budget", "checkpoint each layer", "full checkpointing", "offload", "eager"}
_SMALL = 1 << 16  # a smaller value is not worth a transfer to the host


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One way to train. `again_flops`: operations computed twice, `again_s` their time; `away`: bytes in host memory.
    `seconds`: of a whole step. `why_not`: where the choice does not exist, the reason; then `memory` is None.
    """

    name: str
    memory: StepMemory | None
    again_flops: int = 0
    again_s: float = 0.0
    away: int = 0
    seconds: float = 0.0
    why_not: str = ""

    @property
    def peak(self) -> int | None:
        return None if self.memory is None else self.memory.peak

    def fits(self, budget: int | None) -> bool:
        """Whether the choice exists and keeps to a budget in bytes; None is none."""
        return self.memory is not None and (budget is None or self.memory.peak <= budget)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A choice to be made: how the graph is split. `split` may raise `PartitionError`."""

    name: str
    split: Callable[[JointGraph], Partitioned]


def asked_of(joint: JointGraph, work: Mapping[str, OperatorCost], layers: Layers, *, has_host: bool) -> list[Asked]:
    """The choices for a graph, but for a budget. `has_host`: the host's memory is not the device's own."""
    found = [
        Asked("save all", lambda joint: api.partition(joint, everything_saveable)),
        Asked("min cut", lambda joint: api.partition(joint, "min_cut")),
    ]
    if layers.paths:
        borders = borders_of(joint, functools.partial(layer_of, work, layers))
        by_layer = Policy(lambda candidate: _of_layer(candidate, borders, work, layers))
        found.append(Asked("checkpoint each layer", lambda joint: api.partition(joint, by_layer)))
    found.append(Asked("full checkpointing", lambda joint: api.partition(joint, Policy(_nothing))))
    if has_host:
        found.append(Asked("offload", lambda joint: api.partition(joint, Policy(_to_host))))
    return found


class Budgeted:
    """The splits of a graph by budgets in bytes, of which the plans are made once. `hands_on`:
    gradients leave as they are made, for a reduction into shards, and count no longer.
    """

    def __init__(self, joint: JointGraph, *, hands_on: bool) -> None:
        self.joint, self.hands_on = joint, hands_on
        self._plans: dict[fx.GraphModule, Any] = {}

    def split(self, limit: int) -> Partitioned:
        """The cheapest split that keeps to a limit. Raises `BudgetError` where none does."""
        return api.partition(self.joint, functools.partial(self._cut, limit))

    def _cut(
        self, limit: int, module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if module not in self._plans:
            index = JointIndex(module, num_fwd_outputs)
            index.hands_on = self.hands_on
            merge_equal(index)
            self._plans[module] = the_one("memory budgets").Frontier(index)
        plans = self._plans[module]
        plan = plans.best(max(0, limit))
        halves = split(plans.index, [plans.index.nodes[i] for i in plan.residuals], plan.away)
        return halves.forward, halves.backward


def _nothing(candidate: Any) -> Any:
    return None if _draws(candidate) else nothing_saveable(candidate)


def _draws(candidate: Any) -> bool:
    """Whether a value is drawn, so that it can't be computed again."""
    node = candidate.node
    while kind_of(node) is Kind.ITEM:
        node = node.all_input_nodes[0]
    return kind_of(node) in (Kind.RANDOM, Kind.EFFECT)


def _to_host(candidate: Any) -> str | None:
    return "offload" if candidate.nbytes >= _SMALL and isinstance(value_of(candidate.node), TensorSpec) else None


def borders_of(joint: JointGraph, layer_of: Callable[[str], str]) -> frozenset[str]:
    """The values that a layer makes and operators outside of it read in the forward; views stand for their memory.
    `layer_of`: the layer of an operator by its name, "" outside of layers.
    """
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    layer = [layer_of(node.name) for node in index.nodes]
    found = set()
    for i, reads in enumerate(index.operands):
        if index.needs_tangent[i] or index.kinds[i] in (Kind.VIEW, Kind.ITEM):
            continue
        for operand in reads:
            made = index.root[operand]
            if layer[made] and layer[made] != layer[i]:
                found.add(index.nodes[made].name)
    return frozenset(found)


def layer_of(work: Mapping[str, OperatorCost], layers: Layers, name: str) -> str:
    """The layer of an operator by its name; "" for what is outside of layers."""
    operator = work.get(name)
    return "" if operator is None else layers.of(operator.module)


def _of_layer(candidate: Any, borders: frozenset[str], work: Mapping[str, OperatorCost], layers: Layers) -> str | None:
    if not layer_of(work, layers, candidate.node.name) or _draws(candidate):
        return None
    return "save" if candidate.node.name in borders else "recompute"


def again_in(parts: Partitioned, work: Mapping[str, OperatorCost]) -> tuple[int, float]:
    """Operations and seconds of what the backward computes again."""
    forward = {node.name: node.target for node in parts.forward.graph.nodes if node.op == "call_function"}
    twice = [work[node.name] for node in parts.backward.graph.nodes if forward.get(node.name) is node.target]
    return sum(one.flops for one in twice), sum(one.seconds for one in twice)


def moved_by(parts: Partitioned) -> int:
    """Bytes of saved values that wait in host memory."""
    return sum(value_bytes(value_of(node)) for node in parts.forward.graph.nodes if is_offloaded(node))


def refused(name: str, error: PartitionError) -> Choice:
    """A choice that does not exist for this graph."""
    why = str(error).partition(". ")[0]
    return Choice(name, None, why_not=f"does not fit: {why}" if isinstance(error, BudgetError) else why)
