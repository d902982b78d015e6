"""The min-cut partition: the fewest bytes saved, where only cheap operators are computed again.

`recompute` says which values may be computed again, and `cut` chooses among them. Bytes decide. Among choices of equal
bytes, fewer values win; values that a fused forward writes to memory anyway count least, and values that only the
backward needs count most; then less recomputation wins.

`fused_partition` also counts what a fused forward must write only because it is saved: it prefers a value that is in
memory anyway to one that is a fifth smaller and would otherwise live inside a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph.meta import value_of
from .classify import Kind
from .cut import NEVER, cheapest_residuals, required_by_backward
from .default import prefer_views
from .index import JointIndex, is_number
from .merge import merge_equal
from .recompute import may_recompute
from .split import split
from .tags import Wish, to_offload, wishes

_IN_MEMORY, _IN_A_KERNEL = 4, 5  # prices of a byte, to `fused_partition`


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    compiler: object = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that the fewest bytes are saved for the backward, recomputing what is cheap.

    The arguments are those of PyTorch's partitioner of that name. `static_lifetime_input_indices` are the inputs
    that live on anyway, as parameters do; when given, keeping another input alive has its price in bytes, otherwise
    inputs are free. `compiler` is accepted and not used. Values tagged by `torch.utils.checkpoint` are saved and
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
    away = to_offload(index)
    halves = split(index, prefer_views(index, choose_min_cut(index, static_lifetime_input_indices), away), away)
    return halves.forward, halves.backward


def fused_partition(
    joint_module: fx.GraphModule, _joint_inputs: Any, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The min-cut partition for a compiler that fuses: few bytes saved, and few written only to be saved."""
    index = JointIndex(joint_module, num_fwd_outputs)
    merge_equal(index)
    away = to_offload(index)
    halves = split(index, prefer_views(index, choose_min_cut(index, fuses=True), away), away)
    return halves.forward, halves.backward


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
            # A view shares its base's memory, so the base is what is saved.
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
