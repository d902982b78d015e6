"""The backward's own order: that of the capture, with operators that lower memory brought forward.

Autograd computes the gradient of a layer's input before that of its weight, though the weight's gradient is the last
to read the saved activation. An operator whose result is smaller than the values that it reads last runs as soon as its
operands are ready: here the weight's gradient. Nothing passes an effect or a random operator, and operators stay as
they are, so results do, bit for bit. Greedy, and independent of the residuals: plans are simulated for the order that
runs.
"""

from __future__ import annotations

from typing import Protocol

from .classify import Kind

_THROUGH = (Kind.VIEW, Kind.ITEM)  # share memory with, or come with, what they read
_BARRIERS = (Kind.EFFECT, Kind.RANDOM)


class Nodes(Protocol):
    """The numbered nodes of a joint graph, see `JointIndex`."""

    kinds: list[Kind]
    operands: list[list[int]]
    root: list[int]
    needs_tangent: bytearray
    in_forward: bytearray
    gradient_numbers: list[int]
    output_numbers: list[int]

    def bytes_of(self, i: int) -> int:
        """The size of what node i computes."""


def backward_sequence(index: Nodes) -> list[int]:
    """The nodes that only the backward can compute, in the order they run."""
    kinds = index.kinds
    nodes = [
        i
        for i, bit in enumerate(index.needs_tangent)
        if (bit or (kinds[i] in _BARRIERS and not index.in_forward[i])) and kinds[i] is not Kind.INPUT
    ]
    order: list[int] = []
    start = 0
    for at, i in enumerate(nodes):
        if kinds[i] in _BARRIERS:
            order += _Stretch(index, nodes[start:at]).ordered()
            order.append(i)
            start = at + 1
    return order + _Stretch(index, nodes[start:]).ordered()


class _Stretch:
    """Nodes of the backward with no effect between them."""

    def __init__(self, index: Nodes, nodes: list[int]) -> None:
        self.index, self.nodes = index, nodes
        operands, kinds = index.operands, index.kinds
        inside = set(nodes)
        self.through: dict[int, set[int]] = {}  # for each view and item of the stretch: the operators that it waits for
        self.missing: dict[int, int] = {}  # for each operator of the stretch: how many it waits for
        self.reads: dict[int, tuple[int, ...]] = {}
        self.items: dict[int, list[int]] = {}
        self.dependents: dict[int, list[int]] = {}
        self.readers: dict[int, int] = {}  # for each memory: how many operators are still to read it
        self.reader: dict[int, int] = {}  # the sum of their numbers: where it is one operator, which
        through, readers, reader = self.through, self.readers, self.reader
        for i in nodes:
            if kinds[i] in _THROUGH and operands[i]:
                source = operands[i][0]
                if kinds[i] is Kind.ITEM:
                    self.items.setdefault(source, []).append(i)
                through[i] = through.get(source, set()) if kinds[source] in _THROUGH else {source} & inside
                continue
            waits: set[int] = set()
            for operand in operands[i]:
                if operand in through:
                    waits |= through[operand]
                elif operand in inside:
                    waits.add(operand)
            self.missing[i] = len(waits)
            for one in waits:
                self.dependents.setdefault(one, []).append(i)
            self.reads[i] = tuple({index.root[operand] for operand in operands[i]})
            for r in self.reads[i]:
                readers[r] = readers.get(r, 0) + 1
                reader[r] = reader.get(r, 0) + i
        self.kept = {index.root[i] for i in (*index.gradient_numbers, *index.output_numbers)}
        self.sizes: dict[int, int] = {}
        self.order: list[int] = []
        self.done: set[int] = set()

    def size(self, r: int) -> int:
        if r not in self.sizes:
            kind = self.index.kinds[r]
            self.sizes[r] = 0 if kind in (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER) else self.index.bytes_of(r)
        return self.sizes[r]

    def ordered(self) -> list[int]:
        missing, readers, reader = self.missing, self.readers, self.reader
        ready = set()
        for i in self.nodes:
            if i in self.done:
                continue
            at, freeing = i, set()
            while True:
                self.emit(at)
                for user in self.dependents.get(at, ()):
                    missing[user] -= 1
                    if not missing[user]:
                        ready.add(user)
                        freeing.add(user)
                for r in self.reads.get(at, ()):
                    readers[r] -= 1
                    reader[r] -= at
                    if readers[r] == 1 and reader[r] in ready:
                        freeing.add(reader[r])
                freeing = {
                    one for one in freeing if one not in self.done and self.made_bytes(one) < self.freed_bytes(one)
                }
                if not freeing:
                    break
                # Of the operators that lower memory, the one with the smallest result comes first.
                at = min(freeing, key=lambda one: (self.made_bytes(one), one))
        return self.order

    def made_bytes(self, i: int) -> int:
        """The bytes of operator i's results."""
        if i not in self.items:
            return self.size(i) if self.readers.get(i) or i in self.kept else 0
        return sum(self.size(r) for r in self.items[i] if self.readers.get(r) or r in self.kept)

    def freed_bytes(self, i: int) -> int:
        """The bytes that are freed after operator i, if it runs now."""
        return sum(self.size(r) for r in self.reads.get(i, ()) if self.readers[r] == 1 and r not in self.kept)

    def emit(self, i: int) -> None:
        if i in self.done:
            return
        self.done.add(i)
        for operand in self.index.operands[i]:
            if operand in self.through:
                self.emit(operand)  # nothing waits for views
        self.order.append(i)
        for item in self.items.get(i, ()):
            self.emit(item)
