"""The allocations of a whole step in their order, and the bytes that an allocator reserves for some steps."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence

from ..partitioners import Half, Halves
from .allocator import Allocator, Event, Reserved
from .optimizers import Optimizer
from .sharded import COMPUTE, Span

_STEPS = 3  # the first makes the optimizer's state; what is reserved grows no more after the second, as a rule
_OWN, _STANDING = 1 << 40, 1 << 41  # numbers of memories beside the graph's, and of what stands


Orders = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """The allocations of forward and backward: events as rows of three numbers. `left`: the memories that the
    optimizer's step finds (gradients), let go before the next step.
    """

    numbers: array[int]
    left: tuple[int, ...]

    def events(self) -> Iterator[Event]:
        """The events, in order."""
        rows = iter(self.numbers)
        return zip(rows, rows, rows, strict=True)


def script_of(halves: Halves, orders: Orders, spans: Sequence[Sequence[Span]], *, gradients: bool) -> Script:
    """The script of a split: its halves run in these orders, with these spans beside their operators. `gradients`:
    they stay to the end of the backward.
    """
    writer = _StepWriter()
    saved = dict(halves.roots)
    names = {name: 2 * root for root, name in saved.items()}
    writer.half(halves.forward, orders[0], spans[0], kept=halves.kept, keys={}, odd=0)
    backward = halves.backward
    keys = {i: names[node.name] for i, node in enumerate(backward.index.nodes) if node.name in names}
    for i in backward.index.backward_inputs:
        if size := backward.storages.size[i]:
            writer.take(2 * i + 1, size)
    kept = halves.staying(gradients=gradients)
    writer.half(backward, orders[1], spans[1], kept=kept, keys=keys, odd=1)
    left = {2 * backward.root(node) + 1 for node in backward.outputs} if gradients else set()
    writer.end(left | writer.staying)
    return Script(writer.numbers, tuple(sorted((left | writer.staying) & writer.alive)))


class _StepWriter:
    """Writes the events of a step."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.alive: set[int] = set()
        self.staying: set[int] = set()
        self._next = _OWN

    def take(self, key: int, size: int, stream: int = COMPUTE) -> None:
        if size and key not in self.alive:
            self.numbers.extend((key, size, stream))
            self.alive.add(key)

    def give(self, key: int) -> None:
        if key in self.alive:
            self.numbers.extend((key, 0, 0))
            self.alive.remove(key)

    def new(self) -> int:
        self._next += 1
        return self._next

    def end(self, left: Collection[int]) -> None:
        for key in sorted(self.alive - set(left)):
            self.give(key)

    def half(
        self, half: Half, order: Sequence[int], spans: Sequence[Span], *, kept: set[int], keys: dict[int, int], odd: int
    ) -> None:
        storages = half.storages
        last: dict[int, int] = {}
        for k, i in enumerate(order):
            last.update(dict.fromkeys(storages.touched[i], k))
        last |= {span.root: span.stop for span in spans if span.root is not None}
        ending: dict[int, list[int]] = {}
        for root, k in last.items():
            if root not in kept:
                ending.setdefault(k, []).append(keys.get(root, 2 * root + odd))
        starting: dict[int, list[Span]] = {}
        for span in spans:
            if span.root is None and span.start <= span.stop:
                starting.setdefault(span.start, []).append(span)
        for k, i in enumerate(order):
            for span in starting.get(k, ()):
                self._begin(span, ending, len(order) - 1)
            gone = [*self._made(half, i, last, keys, odd)]
            if storages.workspace[i]:
                gone.append(self.new())
                self.take(gone[-1], storages.workspace[i])
            for key in (*gone, *ending.get(k, ())):
                self.give(key)

    def _begin(self, span: Span, ending: dict[int, list[int]], last: int) -> None:
        for size in span.sizes:
            key = self.new()
            self.take(key, size, span.stream)
            if span.stays:
                self.staying.add(key)
            else:
                ending.setdefault(min(span.stop, last), []).append(key)

    def _made(self, half: Half, i: int, last: dict[int, int], keys: dict[int, int], odd: int) -> Iterator[int]:
        """Take the results of an operator; gives the results that nothing reads."""
        storages = half.storages
        for holder, size in storages.results.get(i, ()):
            is_read = holder is not None and holder in last
            key = keys.get(holder, 2 * holder + odd) if holder is not None and is_read else self.new()
            if key in self.alive:
                key = self.new()
                is_read = False
            self.take(key, size)
            if not is_read:
                yield key
        if i not in storages.results and storages.root[i] == i and storages.size[i]:
            self.take(keys.get(i, 2 * i + odd), storages.size[i])


def reserved_by(script: Script, standing: Iterable[int], optimizer: Optimizer, *, expandable: bool) -> Reserved:
    """The bytes that an allocator reserves for some steps. `standing`: the bytes of each memory that stands."""
    allocator = Allocator(expandable=expandable)
    allocator.run((_STANDING + at, size, COMPUTE) for at, size in enumerate(standing) if size)
    for step in range(_STEPS):
        allocator.run(script.events())
        trace = optimizer.first if step == 0 else optimizer.later
        base = 2 * _STANDING + step * _STANDING
        allocator.run((base + key, size, COMPUTE) for key, size in trace)
        allocator.run((key, 0, 0) for key in script.left)
    return allocator.result()
