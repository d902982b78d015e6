"""The memory of a whole step for one split of its graph: what is alive at each operator, and at the peak by module.

The step is the forward, the backward, and the optimizer's step. What is there all the time (parameters or their shards,
buffers, arguments, the optimizer's state) is under it; gradients are alive from where the backward makes them to the
end of the optimizer's step. Where ranks share parameters, the gathered ones are added while they are alive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..graph.joint import Partitioned
from ..partitioners import Halves, halves_of
from .optimizers import Optimizer
from .ranks import Ranks, Unit
from .replay import Script, script_of
from .sharded import Gathered, Span, bytes_over
from .work import Layers, OperatorCost, pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Bytes of one rank that are there through the whole step. `buckets`: those in which copies of a model average
    gradients. `gathered`: what is outside of layers, whole, through forward and backward; not in `total`. `pieces`: of
    each memory but the optimizer's.
    """

    parameters: int
    buffers: int
    arguments: int
    optimizer: int
    buckets: int = 0
    gathered: int = 0
    pieces: tuple[int, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.arguments + self.optimizer + self.buckets


@dataclasses.dataclass(frozen=True, slots=True)
class Alive:
    """What is alive at the peak: bytes of a kind by module, in so many values."""

    kind: str
    module: str
    nbytes: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """The bytes of one rank over a step. `alive`: at each operator of the forward, of which there are `forward_steps`,
    of the backward, and last at the optimizer's step. `gradients` and `saved`: all gradients, and all that is saved for
    the backward. `at_peak`: what is alive there, the largest first. `script`: the allocations of forward and backward.
    """

    peak: int
    peak_at: str
    alive: tuple[int, ...]
    forward_steps: int
    gradients: int
    saved: int
    workspace: int
    at_peak: tuple[Alive, ...]
    script: Script = dataclasses.field(repr=False, compare=False)


def memory_of(
    parts: Partitioned,
    work: Mapping[str, OperatorCost],
    layers: Layers,
    standing: Standing,
    optimizer: Optimizer,
    ranks: Ranks,
    units: Sequence[Unit],
) -> StepMemory:
    """The memory of a step whose graph is split like this."""
    halves = halves_of(parts)
    is_sharded = ranks.fsdp > 1
    first, second = halves.timelines(gradients=not is_sharded)
    gradients = _gradients(halves, units, ranks)
    base = standing.total
    spans: tuple[list[Span], list[Span]] = [], []
    if is_sharded:
        more = Gathered(halves, work, layers, ranks, units)
        spans = more.forward(first.order), more.backward(second.order)
    forward, backward = (
        [base + own + beside for own, beside in zip(line.bytes, bytes_over(len(line.order), extra), strict=True)]
        for line, extra in zip((first, second), spans, strict=True)
    )
    last = base + gradients + optimizer.workspace
    alive = [*forward, *backward, last]
    peak = max(alive)
    at = alive.index(peak)
    where, found = _at_peak(at, halves, work, gradients=not is_sharded, sizes=(len(forward), len(backward)))
    counted = sum(one.nbytes for one in found)
    if at == len(alive) - 1:
        counted = gradients + optimizer.workspace
        found = [Alive("gradient", "", gradients, 1), Alive("optimizer's workspace", "", optimizer.workspace, 1)]
        where = f"the step of {optimizer.name}" if optimizer.name != "none" else "the end of the backward"
    rest = peak - standing.total - counted
    if rest > 0:
        kind = "gathered, gradients and buffers of collectives" if ranks.size > 1 else "workspace and results"
        found.append(Alive(kind, "", rest, 1))
    saved = sum(halves.backward.storages.size[root] for root in halves.alive)
    line = first if at < len(forward) else second
    half = halves.forward if at < len(forward) else halves.backward
    place = at if at < len(forward) else at - len(forward)
    workspace = half.storages.workspace[line.order[place]] if at < len(alive) - 1 else optimizer.workspace
    ordered = tuple(sorted((one for one in found if one.nbytes), key=lambda one: -one.nbytes))
    script = script_of(halves, (first.order, second.order), spans, gradients=not is_sharded)
    return StepMemory(peak, where, tuple(alive), len(forward), gradients, saved, workspace, ordered, script)


def _gradients(halves: Halves, units: Sequence[Unit], ranks: Ranks) -> int:
    """Bytes of all gradients that stay to the optimizer's step; of a rank's shards."""
    if ranks.fsdp > 1:
        return sum(-(-unit.reduced // ranks.fsdp) for unit in units)
    backward = halves.backward
    return sum(backward.storages.size[root] for root in {backward.root(node) for node in backward.outputs})


def _at_peak(
    at: int, halves: Halves, work: Mapping[str, OperatorCost], *, gradients: bool, sizes: tuple[int, int]
) -> tuple[str, list[Alive]]:
    """The place of the peak, and what is alive there by kind and module."""
    first, second = halves.timelines(gradients=gradients)
    in_forward = at < sizes[0]
    if not in_forward and at - sizes[0] >= sizes[1]:
        return "", []
    half, line = (halves.forward, first) if in_forward else (halves.backward, second)
    place = at if in_forward else at - sizes[0]
    kept = halves.kept if in_forward else halves.staying(gradients=gradients)
    found = half.alive_at(place, line, () if in_forward else halves.alive, kept)
    returned = set() if in_forward else {half.root(node) for node in half.outputs}
    saved = set(halves.roots) if in_forward else halves.alive
    sums: dict[tuple[str, str], list[int]] = {}
    for root, nbytes in found.items():
        kind = "gradient" if root in returned else "saved" if root in saved else "temporary"
        operator = work.get(half.index.nodes[root].name)
        entry = sums.setdefault((kind, pattern(operator.module) if operator else ""), [0, 0])
        entry[0] += nbytes
        entry[1] += 1
    node = half.index.nodes[line.order[place]]
    operator = work.get(node.name)
    side = "forward" if in_forward else "backward"
    place_text = f"{node.name}, {operator.line}" if operator is not None and operator.line else str(node.name)
    return f"{place_text}, in the {side}", [Alive(kind, module, *entry) for (kind, module), entry in sums.items()]
