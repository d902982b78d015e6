"""The min-cut partition: the fewest bytes saved, where only cheap operators are computed again.

`may_recompute` names the values that may be computed again, and `cut` chooses. Bytes decide. Among choices of equal
bytes, fewer values win; values that a fused forward writes to memory anyway count least, and values that only the
backward needs count most; then less recomputation wins.

`fused_partition` also counts values that a fused forward must write only to save them: it prefers a value that is in
memory anyway to a value a fifth smaller that would otherwise live inside a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from ..graph.meta import value_of
from .classify import Kind
from .cut import NEVER, cheapest_residuals, required_by_backward
from .default import divided
from .index import JointIndex, is_number, merge_equal
from .policies import Wish, wishes

_IN_MEMORY, _IN_A_KERNEL = 4, 5  # prices of a byte, to `fused_partition`


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: object,
    compiler: object = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that the fewest bytes are saved for the backward, recomputing cheap values.

    The arguments are as in PyTorch's partitioner. `static_lifetime_input_indices` are the inputs
    that live on anyway, as parameters do: if given, saving any further input costs its bytes; if not, saving inputs
    costs nothing. `compiler` is accepted and not used. Values tagged by `torch.utils.checkpoint` are saved and
    recomputed as asked.

    Examples:
        >>> import torch, foregrad
        >>> joint = foregrad.capture(lambda x: x.sin().sin(), torch.ones(2, requires_grad=True))
        >>> forward, backward = foregrad.min_cut_rematerialization_partition(joint.module, None, num_fwd_outputs=1)
        >>> [node.name for node in backward.graph.nodes if node.op == "placeholder"]
        ['primals_1', 'tangents_1']
    """
    index = JointIndex(joint_module, num_fwd_outputs)
    merge_equal(index)
    return divided(index, choose_min_cut(index, static_lifetime_input_indices))


def fused_partition(
    joint_module: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The min-cut partition for a compiler that fuses: few bytes saved, and few written only to be saved."""
    index = JointIndex(joint_module, num_fwd_outputs)
    merge_equal(index)
    return divided(index, choose_min_cut(index, fuses=True))


def choose_min_cut(
    index: JointIndex, static_inputs: Sequence[int] | None = None, *, fuses: bool = False
) -> list[fx.Node]:
    """The values to save; `fuses`: as `fused_partition` counts."""
    wish = wishes(index)
    allowed = may_recompute(index, wish)
    redo = [0 if bit else NEVER for bit in allowed]
    prices = _save_prices(index, wish, static_inputs, fuses=fuses)
    chosen = cheapest_residuals(index, prices, redo, required_by_backward(index))
    return [index.nodes[i] for i in chosen]


def _save_prices(
    index: JointIndex, wish: bytearray | None, static_inputs: Sequence[int] | None, *, fuses: bool
) -> list[int]:
    """Bytes first: they are counted in units larger than all that breaks ties."""
    shift = (4 * len(index)).bit_length()
    prices = []
    for i, kind in enumerate(index.kinds):
        if index.needs_tangent[i] or kind is Kind.VIEW or (wish is not None and wish[i] == Wish.RECOMPUTE):
            # A view shares its base's memory, so the base is saved.
            prices.append(NEVER)
        elif kind is Kind.CONSTANT or kind is Kind.INPUT:
            prices.append(0)
        else:
            prices.append(_price(index, i, shift, fuses=fuses))
    free = set(static_inputs) if static_inputs else None
    for place, i in enumerate(index.inputs):
        if i in index.written or (free is not None and place not in free):
            size = index.bytes_of(i) * (_IN_MEMORY if fuses else 1)
            prices[i] = (size << shift) + 1 if not is_number(index.nodes[i]) else 0
    return prices


def _price(index: JointIndex, i: int, shift: int, *, fuses: bool) -> int:
    value = value_of(index.nodes[i])
    if isinstance(value, (tuple, list)):
        return NEVER
    if index.kinds[i] is Kind.NUMBER:
        # Compilers take symbolic integers, and nothing else symbolic, as inputs.
        return NEVER if isinstance(value, (torch.SymFloat, torch.SymBool)) else 1
    if not index.exists_in_forward(i):
        tie = 3
    elif index.classes[i].fuses and all(
        index.classes[user].fuses or index.classes[user].fuses_inputs for user in index.users[i]
    ):
        tie = 2
    else:
        tie = 1
    size = index.bytes_of(i)
    if fuses:
        size *= _IN_MEMORY if tie == 1 else _IN_A_KERNEL
    return (size << shift) + tie


# ------------------------------------------------------------------------------------------ what may be computed again
# Which values of the forward may be computed again in the backward, so that the step is not slower for it.
#
# The idea is that of Chen et al. ("Training Deep Nets with Sublinear Memory Cost", 2016), as PyTorch's min-cut
# partitioner uses it: operators bound by memory cost nothing when a compiler fuses them into a reader. So they may
# run again, as long as that fusion is likely and stays short. Heavy operators, random ones and effects never run
# again.
#
# Each rule is one sweep over the graph.

# A reduction is kept if its result is this many times smaller than its operand.
_REDUCTION = 4
# The longest row of fusible operators, counted in the forward's nodes, that runs again as one.
_LONGEST_CHAIN = 100

_CHEAP = (Kind.CHEAP, Kind.FACTORY)


def may_recompute(index: JointIndex, wish: bytearray | None) -> bytearray:
    """For each node, whether the backward may compute it. A node that only the backward needs may always be computed
    there: nothing runs twice. Tags for recomputation or saving overrule the rules.
    """
    allowed = bytearray(len(index))
    kinds, in_forward, needs_tangent = index.kinds, index.in_forward, index.needs_tangent
    for i, kind in enumerate(kinds):
        if kind is Kind.INPUT or needs_tangent[i]:
            continue
        if not in_forward[i] or kind is Kind.VIEW or kind in _CHEAP or kind in {Kind.ITEM, Kind.NUMBER, Kind.CONSTANT}:
            allowed[i] = 1
    rules = _Rules(index, allowed)
    for i in (*rules.materialized(), *rules.reductions(), *reading_written(index)):
        allowed[i] = 0
    for i in rules.used_far_apart():
        allowed[i] = 0
    for i in rules.ends_of_chains():
        allowed[i] = 0
    if wish is not None:
        for i, one in enumerate(wish):
            if one:
                allowed[i] = one == Wish.RECOMPUTE
    for i, kind in enumerate(kinds):
        if kind is Kind.ITEM and not allowed[index.operands[i][0]]:
            allowed[i] = 0
    return allowed


def reading_written(index: JointIndex) -> Iterator[int]:
    """Nodes that read, other than as a view, an input that is overwritten before the backward runs."""
    if index.written:
        for i, operands in enumerate(index.operands):
            if index.kinds[i] is not Kind.VIEW and any(index.root[operand] in index.written for operand in operands):
                yield i


class _Rules:
    """The rules that keep recomputation cheap. Each yields nodes that are better saved."""

    def __init__(self, index: JointIndex, allowed: bytearray) -> None:
        self.index = index
        self.allowed = allowed
        self.fuses = bytearray(op_class.fuses for op_class in index.classes)
        self.takes = bytearray(op_class.fuses_inputs for op_class in index.classes)

    def fusible(self, i: int, user: int) -> bool:
        return bool(self.takes[user] or (self.fuses[i] and self.fuses[user]))

    def _cheap(self, i: int) -> bool:
        return bool(self.allowed[i] and self.index.in_forward[i] and self.index.kinds[i] in _CHEAP)

    def materialized(self) -> Iterator[int]:
        """Values that exist in memory in the backward under any choice, since an operator that does not fuse, or the
        caller, gets them, directly or through views. Computing them again would write them twice.
        """
        index = self.index
        in_forward, kinds, users = index.in_forward, index.kinds, index.users
        in_memory = bytearray(len(index))
        for i in (*index.output_numbers, *index.gradient_numbers):
            in_memory[i] = 1
        for i in range(len(index) - 1, -1, -1):
            if not in_memory[i]:
                for user in users[i]:
                    if (kinds[user] is Kind.VIEW and in_memory[user]) or (
                        not in_forward[user] and not self.fusible(i, user)
                    ):
                        in_memory[i] = 1
                        break
            if in_memory[i] and self._cheap(i):
                yield i

    def reductions(self) -> Iterator[int]:
        """Results much smaller than their operands."""
        index = self.index
        for i, operands in enumerate(index.operands):
            if operands and self._cheap(i):
                read = sum([index.bytes_of(operand) for operand in operands])
                if index.bytes_of(i) * _REDUCTION < read:
                    yield i

    def used_far_apart(self) -> Iterator[int]:
        """Readers of a value that come after an operator that does not fuse and depends on the value: nothing fuses
        across it, so values before and after would both be computed again, from further and further back. This keeps a
        row of residual additions from running again from the start.
        """
        index = self.index
        in_forward, users = index.in_forward, index.users
        end = sys.maxsize
        barrier = [end] * len(index)  # the first operator not fused into the fused readers of node i
        for i in range(len(index) - 1, -1, -1):
            if in_forward[i]:
                barrier[i] = min(
                    [barrier[user] if self.fusible(i, user) else user for user in users[i] if in_forward[user]],
                    default=end,
                )
        for i, bit in enumerate(in_forward):
            if not bit or len(users[i]) < 2:
                continue
            readers = [user for user in users[i] if in_forward[user]]
            first = min([barrier[user] for user in readers], default=end)
            for user in readers:
                if user > first and self.fusible(i, user) and index.kinds[user] is not Kind.VIEW:
                    yield user

    def ends_of_chains(self) -> Iterator[int]:
        """Where a row of fusible operators has become long and is down to one value."""
        index = self.index
        in_forward, users = index.in_forward, index.users
        start: dict[int, int] = {}
        furthest: dict[int, int] = {}
        place = 0
        for i, bit in enumerate(in_forward):
            if not bit:
                continue
            place += 1
            first = start.pop(i, place)
            if place > first + _LONGEST_CHAIN and furthest.get(first, i) <= i and index.kinds[i] is not Kind.VIEW:
                yield i
                continue
            for user in users[i]:
                if in_forward[user] and self.allowed[user] and self.fusible(i, user):
                    start[user] = min(start.get(user, first), first)
                    furthest[first] = max(furthest.get(first, user), user)
