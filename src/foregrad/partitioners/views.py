"""Saving a view in place of its base, where that is the same memory and fewer operators.

Partitioners choose bases, so several views of one base are saved as one value. But if the backward reads a single view
(the transpose of a matrix product, for instance), the forward has that view, and the backward need not take it again. A
compiler that never writes the base to memory then saves no more than the view.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from .classify import Kind
from .index import JointIndex, is_tuple
from .split import backward_needs


def prefer_views(index: JointIndex, residuals: list[fx.Node], away: Collection[int] = ()) -> list[fx.Node]:
    """The residuals, where a value that is read through a single view of the forward is replaced by that view. Values
    in `away` stay: they are copied.
    """
    used, computed = backward_needs(index, [index.number[node] for node in residuals])
    candidates = {i for i in used if index.kinds[i] is not Kind.INPUT}
    only_reader = _only_readers(index, candidates, computed)
    chosen = []
    for i in used:
        best = at = i
        while i not in away and (reader := only_reader.get(at, -1)) >= 0:
            at = reader
            if not is_tuple(index.nodes[at]) and index.bytes_of(at) <= index.bytes_of(i):
                best = at
        chosen.append(index.nodes[best])
    return chosen


def _only_readers(index: JointIndex, candidates: set[int], computed: bytearray) -> dict[int, int]:
    """For each candidate, and each view on the way: its single reader in the backward, if that is a view that the
    forward takes too; -1 if there are other readers.
    """
    kinds, in_forward, operands = index.kinds, index.in_forward, index.operands
    only: dict[int, int] = {}
    followed = set(candidates)
    for i, bit in enumerate(computed):
        if not bit:
            continue
        is_view = kinds[i] is Kind.VIEW and in_forward[i]
        for operand in operands[i]:
            if operand in followed:
                first = operand not in only and is_view
                only[operand] = i if first else -1
                if first:
                    followed.add(i)
    for i in index.gradient_numbers:
        only[i] = -1
    return only
