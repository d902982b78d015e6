"""The min-cut partition: the fewest bytes saved, where only what is cheap is computed again.

Which values may be computed again is `recompute`'s answer, which of them best are is `cut`'s. Bytes decide. Among
choices of equal bytes, fewer values win, those that a fused forward writes to memory anyway count least, and those
that only the backward wants count most; then less recomputation wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .classify import Kind
from .cut import NEVER, cheapest_residuals, required_by_backward
from .index import JointIndex, is_number, value_of
from .merge import merge_equal
from .recompute import may_recompute
from .split import split
from .tags import Wish, wishes
from .views import prefer_views

__all__ = ["choose_min_cut", "min_cut_rematerialization_partition"]


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
    """
    index = JointIndex(joint_module, num_fwd_outputs)
    merge_equal(index)
    halves = split(index, prefer_views(index, choose_min_cut(index, static_lifetime_input_indices)))
    return halves.forward, halves.backward


def choose_min_cut(index: JointIndex, static_inputs: Sequence[int] | None = None) -> list[fx.Node]:
    """The values to save."""
    wish = wishes(index)
    allowed = may_recompute(index, wish)
    redo = [0 if bit else NEVER for bit in allowed]
    chosen = cheapest_residuals(index, _save_prices(index, wish, static_inputs), redo, required_by_backward(index))
    return [index.nodes[i] for i in chosen]


def _save_prices(index: JointIndex, wish: bytearray | None, static_inputs: Sequence[int] | None) -> list[int]:
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
            prices.append(_price(index, i, shift))
    free = set(static_inputs) if static_inputs else None
    for place, i in enumerate(index.inputs):
        if i in index.written or (free is not None and place not in free):
            prices[i] = (index.bytes_of(i) << shift) + 1 if not is_number(index.nodes[i]) else 0
    return prices


def _price(index: JointIndex, i: int, shift: int) -> int:
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
    return (index.bytes_of(i) << shift) + tie
