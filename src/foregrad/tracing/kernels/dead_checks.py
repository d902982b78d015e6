"""Operators whose results nobody needs, and which have effects by PyTorch's register or raise for some values: an index
out of bounds, a division by zero.

Eager runs them. As nothing of the graph needs them, each becomes a check on what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._torch.ops import OpOverload, has_effects
from ...graph.meta import TensorSpec
from ..tape.origin import user_line
from ..tape.tape import Entry, Tape, entries_in
from .checks import Check

__all__ = ["dead_checks"]

aten = torch.ops.aten

# Packets all of whose overloads look at the values of an index, a class or a probability.
_LOOK_AT_VALUES = (
    "index", "index_put", "_unsafe_index_put", "index_select", "index_add", "index_copy", "index_fill", "index_reduce",
    "gather", "scatter", "scatter_add", "scatter_reduce", "take", "put", "masked_scatter",
    "embedding", "_embedding_bag", "_embedding_bag_forward_only",
    "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "multilabel_margin_loss_forward",
    "binary_cross_entropy", "max_unpool2d", "max_unpool3d",
)  # fmt: skip
_DIVIDE = ("floor_divide", "remainder", "fmod", "div")
_RAISING = {getattr(aten, name) for name in _LOOK_AT_VALUES if hasattr(aten, name)}
_DIVIDING = {getattr(aten, name) for name in _DIVIDE}


def dead_checks(tape: Tape, outputs: Sequence[Any], after: int) -> Iterator[Check]:
    """A check for each such operator of the forward that none of the outputs needs; `after`: decisions before it."""
    raising = [entry for entry in tape.forward() if _may_raise(entry)]
    live = set(map(id, tape.live(outputs))) if raising else set()
    for entry in raising:
        if id(entry) not in live and all(
            isinstance(e.spec, TensorSpec) for e in entries_in([entry.args, entry.kwargs])
        ):
            yield Check(entry.target, entry.args, entry.kwargs, user_line(entry.origin), after, in_backward=False)


def _may_raise(entry: Entry) -> bool:
    op = entry.target
    if not isinstance(op, OpOverload):
        return False
    if op.namespace != "aten":
        return has_effects(op)
    if op.overloadpacket in _DIVIDING:
        spec = entry.spec
        return isinstance(spec, TensorSpec) and not (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return op.overloadpacket in _RAISING
