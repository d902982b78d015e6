"""The cheapest choice of residuals, when saving a value and computing it again each have a price.

A value that the backward needs must be saved, or computed again, and then its operands are needed too. The cheapest
such choice is a minimum cut (the "project selection" of Rhys, 1970, and Picard, 1976): each value is an arc whose
capacity is the price of saving it, computing it again is an arc from the source, and an operand's arc leads into
its readers' with a capacity that is never cut.

Most values need no cut. What is needed for certain and can't be computed again is saved; what follows for nothing
from saved values is there. Only the rest becomes a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import PartitionError
from .classify import Kind
from .index import JointIndex
from .maxflow import min_cut

NEVER = 1 << 120  # the price of what may not be done: more than all true prices together


class Dependencies(Protocol):
    """The graph that residuals are chosen for: nodes by number, in topological order. A `JointIndex` or part of one."""

    @property
    def operands(self) -> list[list[int]]: ...

    @property
    def kinds(self) -> list[Kind]: ...

    def __len__(self) -> int: ...

    def describe(self, i: int) -> str: ...


def required_by_backward(index: JointIndex) -> list[int]:
    """The values that the backward reads and the forward can compute, with gradients that need no tangents."""
    needs_tangent, for_backward = index.needs_tangent, index.for_backward
    required = bytearray(len(index))
    for i, reads in enumerate(index.operands):
        if needs_tangent[i] and for_backward[i]:
            for operand in reads:
                required[operand] = 1
    for i in index.gradient_numbers:
        required[i] = 1
    return [i for i, bit in enumerate(required) if bit and not needs_tangent[i]]


def cheapest_residuals(
    index: Dependencies, save: Sequence[int], redo: Sequence[int], required: Iterable[int]
) -> list[int]:
    """The numbers of the nodes to save, at the least sum of `save` over them and `redo` over what is recomputed.

    Prices are integers up to 2**100 or `NEVER`. Of equally cheap choices the one that recomputes least is taken.
    Raises `PartitionError`, with the chain of reasons, if a needed value may be neither saved nor recomputed.
    """
    certain = bytearray(len(index))
    for i in required:
        certain[i] = 1
    needed = bytearray(certain)
    chosen = _certainly_saved(index, save, redo, certain)
    free = _free(index, save, redo, chosen)
    for i in range(len(index) - 1, -1, -1):
        if needed[i] or certain[i]:
            needed[i] = not free[i]
            if free[i] and save[i] == 0 and index.kinds[i] not in _ALWAYS_THERE and not _follows(index, redo, free, i):
                chosen.append(i)  # an output, say: kept by the caller, and computed again unless it is listed
            if needed[i] and redo[i] < NEVER:
                for operand in index.operands[i]:
                    needed[operand] = 1
    undecided = [i for i, bit in enumerate(needed) if bit]
    return sorted({*chosen, *(_cut(index, save, redo, undecided, certain) if undecided else ())})


def _certainly_saved(index: Dependencies, save: Sequence[int], redo: Sequence[int], certain: bytearray) -> list[int]:
    """Nodes that can't be recomputed and that every choice needs. Marks in `certain` all that every choice needs."""
    saved = []
    reader: dict[int, int] = {}
    for i in range(len(index) - 1, -1, -1):
        if not certain[i]:
            continue
        if redo[i] >= NEVER:
            if save[i] >= NEVER:
                raise _infeasible(index, i, reader)
            saved.append(i)
        elif save[i] >= NEVER:
            for operand in index.operands[i]:
                certain[operand] = 1
                reader[operand] = i
    saved.reverse()
    return saved


def _free(index: Dependencies, save: Sequence[int], redo: Sequence[int], chosen: list[int]) -> bytearray:
    """A mask of the values that the backward has, or can compute, at no price."""
    free = bytearray(len(index))
    for i in chosen:
        free[i] = 1
    for i, reads in enumerate(index.operands):
        if not free[i]:
            free[i] = save[i] == 0 or (redo[i] == 0 and all(map(free.__getitem__, reads)))
    return free


_ALWAYS_THERE = (Kind.INPUT, Kind.CONSTANT)


def _follows(index: Dependencies, redo: Sequence[int], free: bytearray, i: int) -> bool:
    """Whether node i follows at no price from what the backward has."""
    return redo[i] == 0 and all(map(free.__getitem__, index.operands[i]))


def _cut(
    index: Dependencies, save: Sequence[int], redo: Sequence[int], undecided: list[int], certain: bytearray
) -> list[int]:
    """Solve for the undecided values. Sink side: present in the backward (outer), or computed in it (inner)."""
    inner: dict[int, int] = {}  # the vertex that stands for computing a value again
    outer: dict[int, int] = {}  # the vertex that stands for having it
    from_source: list[int] = []
    to_sink: list[int] = []
    arcs: list[tuple[int, int, int]] = []
    for i in undecided:
        outer[i] = len(from_source)
        to_sink.append(NEVER if certain[i] else 0)
        if redo[i] >= NEVER:
            from_source.append(save[i])
            continue
        if save[i] < NEVER:
            from_source.append(0)
            to_sink.append(0)
            arcs.append((len(from_source), outer[i], save[i]))
        inner[i] = len(from_source)
        from_source.append(redo[i])
        for operand in index.operands[i]:
            if operand in outer:
                arcs.append((outer[operand], inner[i], NEVER))
    _, is_sink = min_cut(len(from_source), from_source, to_sink, arcs)
    return [i for i in undecided if is_sink[outer[i]] and not (i in inner and is_sink[inner[i]])]


def _infeasible(index: Dependencies, i: int, reader: dict[int, int]) -> PartitionError:
    reasons = {
        Kind.RANDOM: "draws random numbers, which must not be drawn twice",
        Kind.EFFECT: "has an effect, which must not happen twice",
    }
    why = reasons.get(index.kinds[i], "may not be computed again")
    lines = [f"{index.describe(i)} {why}, and its value can't be saved"]
    while i in reader:
        i = reader[i]
        lines.append(f"it is needed by {index.describe(i)}, which must be computed again in the backward")
    lines.append("the backward needs that value")
    return PartitionError("no partition exists:\n  " + "\n  ".join(lines))
