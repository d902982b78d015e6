"""The memory that a split takes, storage by storage, for the schedule that runs: both halves, in their order.

A storage lives from the operator that makes it to the last operator that reads it or a view of it. Outputs of the
forward live on, since the caller has them; residuals live until their last use in the backward; gradients live to the
end. Arguments, parameters and buffers are alive before the call, and count nothing. The eager backend's generated code
does the same (`del` after each last use). While an operator runs, the workspace of its kernel is added (workspaces.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from .._torch.offload import OFFLOAD
from ..graph.meta import value_of
from .classify import Kind
from .index import JointIndex
from .instead import device_of, state_size
from .split import Excerpt, backward_needs, backward_order, forward_order
from .workspaces import bytes_of_results, nbytes, workspace

__all__ = ["Liveness", "Storages", "Timeline", "nbytes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """The bytes alive while each operator of a half runs: `bytes[k]` while `order[k]` does."""

    order: list[int]
    bytes: list[int]
    after: int

    @property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    @property
    def peak_node(self) -> int | None:
        """The operator during which most is alive."""
        return self.order[self.bytes.index(self.peak)] if self.order else None


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes alive through one step, beyond what was alive before it."""

    forward: Timeline
    backward: Timeline
    saved_bytes: int  # of storages that only the backward keeps alive

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.forward.after, self.backward.peak, self.backward.after)


_NO_STATES: Mapping[int, int] = {}


class Storages:
    """The storages of a joint graph's nodes: which node's memory each shares, what each operator allocates."""

    def __init__(self, index: JointIndex) -> None:
        self.index = index
        self.root = list(index.root)
        self.size = [0] * len(index)
        # For operators with several results: (the item that holds the storage, or None where nobody reads it; bytes).
        self.results: dict[int, list[tuple[int | None, int]]] = {}
        self.workspace = [
            0 if kind in _NOTHING else workspace(node) for node, kind in zip(index.nodes, index.kinds, strict=True)
        ]
        items: dict[int, dict[int, int]] = {}
        for i, kind in enumerate(index.kinds):
            if kind is Kind.ITEM:
                source, at = index.operands[i][0], index.nodes[i].args[1]
                first = items.setdefault(source, {}).setdefault(at, i)
                self.root[i] = first
            elif kind is Kind.VIEW:
                self.root[i] = self.root[index.operands[i][0]] if index.operands[i] else i
        for i, kind in enumerate(index.kinds):
            if kind in _NOTHING or self.root[i] != i or index.nodes[i].target is OFFLOAD:
                continue
            value = value_of(index.nodes[i])
            if isinstance(value, (tuple, list)):
                holders = items.get(i, {})
                self.results[i] = [(holders.get(at), size) for at, size in enumerate(bytes_of_results(index.nodes[i]))]
                for holder, size in self.results[i]:
                    if holder is not None:
                        self.size[holder] = size
            else:
                self.size[i] = nbytes(value)
        for i in index.backward_inputs:
            self.size[i] = nbytes(value_of(index.nodes[i]))
        # Bytes of the generator's state that is saved where a random operator runs once more.
        self.states = {i: state_size(device) for i in index.replays if (device := device_of(index, i)) is not None}
        # For each node, the storages that running it makes or reads, each once.
        root = self.root
        # An argument of a half, say, has a size that is told later.
        counts = [bool(size) or kind is Kind.INPUT for size, kind in zip(self.size, index.kinds, strict=True)]
        self.touched = [
            tuple({r for r in (root[i], *[root[operand] for operand in reads]) if counts[r]})
            for i, reads in enumerate(index.operands)
        ]

    def liveness(self, residuals: Iterable[int]) -> Liveness:
        """The memory of the split at these residuals."""
        return self.of_split(*backward_needs(self.index, residuals))

    def of_split(
        self, used: list[int], computed: bytearray, away: Collection[int] = (), excerpt: Excerpt | None = None
    ) -> Liveness:
        """The memory of the split whose backward takes the residuals `used`, `away` among them from host memory, and
        computes `computed` (see `backward_needs`, also for `excerpt`).
        """
        index, root = self.index, self.root
        kept = {root[i] for i in index.output_numbers}
        saved = {root[i] for i in used if i not in away} - kept
        states = {i: size for i, size in self.states.items() if computed[i]}
        forward = self.timeline(forward_order(index, used, excerpt), set(), kept | saved, states=states)
        own = {r for r in saved if index.kinds[r] is not Kind.INPUT}
        tangents = set(index.backward_inputs)
        held = sum(self.size[r] for r in kept)
        noted = sum(states.values())
        returned = {root[i] for i in index.gradient_numbers}
        returned |= self.held_tangents(tangents)
        order = backward_order(index, computed, used, away, excerpt)
        states = {i: -size for i, size in states.items()}
        backward = self.timeline(order, own | tangents, returned, held + noted, states)
        return Liveness(forward, backward, sum(self.size[r] for r in own) + noted)

    def held_tangents(self, tangents: Iterable[int]) -> set[int]:
        """Cotangents alive to the end: `loss.backward()` makes that of a single number, and holds it."""
        return {i for i in tangents if self.size[i] <= _NUMBER}

    def timeline(
        self,
        order: Sequence[int],
        alive: set[int],
        kept: set[int],
        others: int = 0,
        states: Mapping[int, int] = _NO_STATES,
    ) -> Timeline:
        """The bytes alive while each operator of `order` runs.

        `alive`: storages present at the beginning, freed after their last use. `kept`: storages that are never freed.
        `others`: bytes alive all the time. `states`: the bytes of a generator's state that are alive from an operator
        on, or (negative) that are exchanged for another state at an operator and freed after it.
        """
        touched, root, size, results, own = self.touched, self.root, self.size, self.results, self.workspace
        last: dict[int, int] = {}  # where in `order` a storage is made or read last
        for k, i in enumerate(order):
            for r in touched[i]:
                last[r] = k
        present = set(alive)
        # Bytes that come with each operator, less those that went after the one before it.
        change = [0] * (len(order) + 1)
        change[0] = others + sum([size[r] for r in alive if r in last or r in kept])
        exchanged: list[tuple[int, int]] = []  # (where states are, bytes that are only there after or before that)
        for k, i in enumerate(order):
            before = change[k]
            if i in results:
                for holder, part in results[i]:
                    change[k] += part
                    # What nobody reads goes at once, and so does a second copy of a result that was saved.
                    if holder is None or holder not in last or holder in present:
                        change[k + 1] -= part
                    else:
                        present.add(holder)
            elif root[i] == i and size[i] and i not in present:
                change[k] += size[i]
                present.add(i)
            if i in states:
                state = states[i]
                if state < 0:  # both states are there while they are exchanged
                    exchanged.append((k, change[k] - before + state))
                change[k + (state < 0)] += state
        for r, k in last.items():
            if r in present and r not in kept:
                change[k + 1] -= size[r]
        live = list(itertools.accumulate(change))
        after = live.pop()
        bytes_in_use = [bytes_ + own[i] for bytes_, i in zip(live, order, strict=True)]
        for k, less in exchanged:
            bytes_in_use[k] = max(bytes_in_use[k], live[k] - less)
        return Timeline(list(order), bytes_in_use, after)


_NUMBER = 16  # bytes of the largest single number
_NOTHING = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.ITEM, Kind.VIEW)
