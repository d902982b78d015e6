"""The tensors of inputs that share memory: each a view of one value, all of that memory."""

from __future__ import annotations

import torch

from ...graph.meta import TensorSpec
from ..tape.tape import Entry
from .alias import Value
from .view_replay import View
from .views import without_bits

__all__ = ["member_of"]

aten = torch.ops.aten


def member_of(whole: Value, spec: TensorSpec, fake: torch.Tensor, entry: Entry) -> Value:
    """An input's tensor as a view of the whole memory that it shares; `entry` stands for it until a write."""
    parent = whole
    call = object()
    if spec.dtype is not whole.spec.dtype:
        size = whole.spec.shape[0] // spec.dtype.itemsize
        cut = size * spec.dtype.itemsize
        if cut != whole.spec.shape[0]:
            cut_spec = TensorSpec((cut,), (1,), whole.spec.dtype, spec.device)
            parent = Value(None, None, cut_spec, parent, View(aten.slice.Tensor, (0, 0, cut), {}, None, call, False))
            parent.generation = -1
        typed = TensorSpec((size,), (1,), spec.dtype, spec.device)
        parent = Value(None, None, typed, parent, View(aten.view.dtype, (spec.dtype,), {}, None, call, False))
        parent.generation = -1
    layout = (list(spec.shape), list(spec.stride), spec.offset)
    view = View(aten.as_strided.default, layout, {}, None, call, False, is_member=True)
    value = Value(fake, entry, without_bits(spec), parent, view)
    for bit, op in ((spec.conj, aten._conj.default), (spec.neg, aten._neg_view.default)):
        if bit:
            value.entry, value.generation = None, -1
            so_far = TensorSpec(
                spec.shape, spec.stride, spec.dtype, spec.device, spec.offset, spec.conj, op is aten._neg_view.default
            )
            value = Value(fake, entry, so_far, value, View(op, (), {}, None, call, False))
    return value
