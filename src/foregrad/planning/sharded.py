"""The memories of `fully_shard` beside a step's own: gathered parameters, gradients until they are shards, buffers.

In the order of allocations, the program's (FSDP2 of PyTorch 2.5 and later):

* Parameters outside of layers are gathered before the forward, and stay to the end of the backward. Their buffer of the
  gather is there until the first layer's is copied out.
* A layer in the forward: the buffer of its gather, then its parameters, copied out of the buffer, which is there until
  the next layer's is copied out, the parameters until the layer ends, or, if they stay gathered, to its backward.
* A layer in the backward: its parameters, gathered while the layer after it ran; while it runs, the buffer of the next
  one's gather. At its end its parameters go, and its gradients are copied into the buffer of a reduction, which is
  there until the next layer's. The shards stay.
* Buffers of gathers and results of reductions are made on streams of their own, all else on the one that computes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from ..partitioners import Half, Halves
from .ranks import Ranks, Unit
from .work import Layers, OperatorCost

COMPUTE, GATHER, REDUCE = range(3)
"""The streams that memory is made on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Memories that are there from an operator of a half to a later operator, both counted, by their places. `stays`:
    to the end of the optimizer's step. `root`: of the storage of an operator's that stays longer, where it is such.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]
    stream: int = COMPUTE
    stays: bool = False
    root: int | None = None


def bytes_over(count: int, spans: Iterable[Span]) -> list[int]:
    """The bytes of spans beside each of so many operators."""
    changes = [0] * (count + 1)
    for span in spans:
        if span.start <= span.stop and span.start < count:
            changes[span.start] += sum(span.sizes)
            changes[min(span.stop, count - 1) + 1] -= sum(span.sizes)
    return list(itertools.accumulate(changes[:-1]))


class Gathered:
    """The spans of a sharded step, for one split of its graph."""

    def __init__(
        self, halves: Halves, work: Mapping[str, OperatorCost], layers: Layers, ranks: Ranks, units: Sequence[Unit]
    ) -> None:
        self.halves, self.work, self.layers, self.ranks = halves, work, layers, ranks
        self.by_path = {unit.path: unit for unit in units}
        self.root = self.by_path.get("", Unit("", 0, 0, 0))

    def forward(self, order: Sequence[int]) -> list[Span]:
        """Beside the forward's operators."""
        last, runs, root = len(order) - 1, self._runs(self.halves.forward, order), self.root
        first = runs[0][1] if runs else last
        found = [Span(0, first, (root.whole,), GATHER), Span(0, last, root.parts)] if root.whole else []
        for at, (unit, start, stop) in enumerate(runs):
            following = runs[at + 1][1] if at + 1 < len(runs) else stop
            stays = not self.ranks.reshard or at == len(runs) - 1
            found.append(Span(start, following if self.ranks.overlap else start, (unit.whole,), GATHER))
            found.append(Span(start, last if stays else stop, unit.parts))
        return found

    def backward(self, order: Sequence[int]) -> list[Span]:
        """Beside the backward's operators."""
        last, runs, root = len(order) - 1, self._runs(self.halves.backward, order), self.root
        found = [Span(0, max(0, last - 1), root.parts)] if root.whole else []
        reshard, overlap = self.ranks.reshard, self.ranks.overlap
        for at, (unit, start, stop) in enumerate(runs):
            stayed = not reshard or at == 0
            if not stayed and not overlap:
                found.append(Span(start, start, (unit.whole,), GATHER))
            found.append(Span(0 if stayed else start, max(start, stop - 1), unit.parts))
            after = runs[at + 1] if at + 1 < len(runs) else None
            if after is not None and reshard and overlap:
                found.append(Span(start, after[1], (after[0].whole,), GATHER))
            if unit.reduced:
                until = after[2] - 1 if after is not None else last
                found.append(Span(stop, max(stop, until) if overlap else stop, (unit.reduced,)))
                found.append(self._shards(unit, stop, last))
        if root.reduced:
            found += [Span(last, last, (root.reduced,)), self._shards(root, last, last)]
        return found + self._gradients(order, {unit.path: stop for unit, _, stop in runs})

    def _shards(self, unit: Unit, start: int, last: int) -> Span:
        return Span(start, last, (-(-unit.reduced // self.ranks.fsdp),), REDUCE, stays=True)

    def _runs(self, half: Half, order: Sequence[int]) -> list[tuple[Unit, int, int]]:
        """Layers with the first and last of their operators, in the order in which they run first."""
        spans: dict[str, tuple[int, int]] = {}
        for at, i in enumerate(order):
            operator = self.work.get(half.index.nodes[i].name)
            path = self.layers.of(operator.module) if operator is not None else ""
            if path:
                spans[path] = spans.get(path, (at, at))[0], at
        return [(self.by_path[path], *span) for path, span in spans.items() if path in self.by_path]

    def _gradients(self, order: Sequence[int], ends: Mapping[str, int]) -> list[Span]:
        """Gradients are whole until their layer's backward ends; gradients outside of layers to the end."""
        half, index, found = self.halves.backward, self.halves.backward.index, []
        made = {i: k for k, i in enumerate(order)}
        for i in {half.root(node) for node in half.outputs}:
            operator = self.work.get(index.nodes[i].name)
            if i in made and operator is not None:
                end = ends.get(self.layers.of(operator.module), len(order) - 1)
                found.append(Span(made[i] + 1, end, (half.storages.size[i],), root=i))
        return found
