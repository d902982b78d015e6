"""The memory of a whole step for one split of its graph: what is alive at each operator, and at the peak by module.

The step is the forward, the backward, and the optimizer's step. What is there all the time (parameters or their shards,
buffers, arguments, the optimizer's state) is under it; gradients are alive from where the backward makes them to the
end of the optimizer's step. Where ranks share parameters, the gathered ones are added while they are alive.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ..graph.joint import Partitioned
from ..partitioners import Half, Halves, halves_of
from .optimizers import Optimizer
from .ranks import Ranks, Unit
from .work import Layers, OperatorCost, pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Bytes of one rank that are there through the whole step. `buckets`: those in which copies of a model average
    gradients. `gathered`: what is outside of layers, whole, through forward and backward; not in `total`.
    """

    parameters: int
    buffers: int
    arguments: int
    optimizer: int
    buckets: int = 0
    gathered: int = 0

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
    the backward. `at_peak`: what is alive there, the largest first.
    """

    peak: int
    peak_at: str
    alive: tuple[int, ...]
    forward_steps: int
    gradients: int
    saved: int
    workspace: int
    at_peak: tuple[Alive, ...]


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
    if is_sharded:
        more = _Gathered(halves, work, layers, ranks, units)
        forward = [base + count + extra for count, extra in zip(first.bytes, more.forward(first.order), strict=True)]
        backward = [
            base + count + extra for count, extra in zip(second.bytes, more.backward(second.order), strict=True)
        ]
    else:
        forward, backward = ([base + count for count in line.bytes] for line in (first, second))
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
    return StepMemory(peak, where, tuple(alive), len(forward), gradients, saved, workspace, ordered)


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
        operator = _made_by(half, root, work)
        entry = sums.setdefault((kind, pattern(operator.module) if operator else ""), [0, 0])
        entry[0] += nbytes
        entry[1] += 1
    node = half.index.nodes[line.order[place]]
    operator = work.get(node.name)
    side = "forward" if in_forward else "backward"
    place_text = f"{node.name}, {operator.line}" if operator is not None and operator.line else str(node.name)
    return f"{place_text}, in the {side}", [Alive(kind, module, *entry) for (kind, module), entry in sums.items()]


def _made_by(half: Half, root: int, work: Mapping[str, OperatorCost]) -> OperatorCost | None:
    return work.get(half.index.nodes[root].name)


class _Gathered:
    """Bytes beside a sharded step's own: gathered parameters, gradients until they are shards, buffers of
    collectives.
    """

    def __init__(
        self, halves: Halves, work: Mapping[str, OperatorCost], layers: Layers, ranks: Ranks, units: Sequence[Unit]
    ) -> None:
        self.halves, self.work, self.layers, self.ranks = halves, work, layers, ranks
        self.by_path = {unit.path: unit for unit in units}
        self.root = self.by_path.get("", Unit("", 0, 0, 0))

    def _units(self, half: Half, order: Sequence[int]) -> list[str]:
        """The layer that each operator belongs to; what is between two operators of a layer is its own."""
        found = []
        for i in order:
            operator = self.work.get(half.index.nodes[i].name)
            found.append(self.layers.of(operator.module) if operator is not None else "")
        return found

    @staticmethod
    def _runs(units: Sequence[str]) -> list[tuple[str, int, int]]:
        """Layers with the first and last of their operators, in the order in which they run first."""
        spans: dict[str, tuple[int, int]] = {}
        for at, path in enumerate(units):
            if path:
                spans[path] = spans.get(path, (at, at))[0], at
        return [(path, start, stop) for path, (start, stop) in spans.items()]

    def forward(self, order: Sequence[int]) -> list[int]:
        """Beside each operator of the forward."""
        more = _Line(len(order), self.root.whole)
        runs = self._runs(self._units(self.halves.forward, order))
        for at, (path, start, stop) in enumerate(runs):
            unit = self.by_path.get(path)
            if unit is None:
                continue
            stays = not self.ranks.reshard or at == len(runs) - 1
            more.add(start, len(order) - 1 if stays else stop, unit.whole)
            if self.ranks.overlap:  # its buffer is there until the next one is copied out, the next one's already
                more.add(start, stop, unit.whole)
                following = self.by_path.get(runs[at + 1][0]) if at + 1 < len(runs) else None
                more.add(start, stop, following.whole if following is not None else 0)
        return more.bytes()

    def backward(self, order: Sequence[int]) -> list[int]:
        """Beside each operator of the backward."""
        more = _Line(len(order), self.root.whole)
        runs = self._runs(self._units(self.halves.backward, order))
        shards, last = 1 / self.ranks.fsdp, len(order) - 1
        for at, (path, start, stop) in enumerate(runs):
            unit = self.by_path.get(path)
            if unit is None:
                continue
            begin = 0 if not self.ranks.reshard or at == 0 else start
            more.add(begin, stop, unit.whole)
            following = self.by_path.get(runs[at + 1][0]) if at + 1 < len(runs) else None
            if following is not None and self.ranks.overlap and self.ranks.reshard:
                more.add(start, stop, following.whole)
            until = runs[at + 1][2] if at + 1 < len(runs) else last
            more.add(stop, until if self.ranks.overlap else stop, unit.reduced)  # the buffer of its reduction
            more.add(stop, last, round(unit.reduced * shards))
        self._gradients(order, {path: stop for path, _, stop in runs}, more)
        return more.bytes()

    def _gradients(self, order: Sequence[int], ends: Mapping[str, int], more: _Line) -> None:
        """Gradients are whole until their layer's backward ends; those outside of layers to the end, where they are
        reduced.
        """
        half, index = self.halves.backward, self.halves.backward.index
        made = {i: k for k, i in enumerate(order)}
        for node in half.outputs:
            i = half.root(node)
            operator = self.work.get(index.nodes[i].name)
            if i in made and operator is not None:
                end = ends.get(self.layers.of(operator.module), len(order) - 1)
                more.add(made[i] + 1, end, half.storages.size[i])
        if order:
            more.add(len(order) - 1, len(order) - 1, self.root.reduced)


class _Line:
    """Bytes over the operators of a half, as sums of spans."""

    def __init__(self, count: int, base: int) -> None:
        self.count, self.base, self._changes = count, base, [0] * (count + 1)

    def add(self, start: int, stop: int, nbytes: int) -> None:
        """So many bytes from one operator to another, both counted."""
        if start <= stop and start < self.count:
            self._changes[start] += nbytes
            self._changes[min(stop, self.count - 1) + 1] -= nbytes

    def bytes(self) -> list[int]:
        return [self.base + count for count in itertools.accumulate(self._changes[:-1])]
