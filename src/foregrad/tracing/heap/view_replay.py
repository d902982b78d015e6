"""A view operator and its arguments, and how it is taken again of another value of the tensor it was taken of."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ...graph.meta import TensorSpec
from ..tape.opinfo import IDENTITIES
from ..tape.origin import Made
from ..tape.tape import Entry
from .refusals import past_the_edges
from .views import Emit, without_bits

__all__ = ["View", "replayed", "with_bits"]

aten = torch.ops.aten


class View:
    """A view operator applied to a value: `op(source, *args)`, output `index` of several when not None."""

    __slots__ = ("args", "call", "grad_enabled", "index", "is_member", "kwargs", "made", "op")

    def __init__(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int | None,
        call: object,
        grad_enabled: bool,
        *,
        is_member: bool = False,
        made: Made | None = None,
    ) -> None:
        self.op = op
        self.args = args  # without the source
        self.kwargs = kwargs
        self.index = index
        self.call = call  # one object for all outputs of one call
        self.grad_enabled = grad_enabled
        self.is_member = is_member  # an input's place in a memory that inputs share
        self.made = made  # where the user's program made it, its autograd sequence number, what was decomposed into it

    def is_same(self, other: View) -> bool:
        """Whether both give the same view of one tensor."""
        ours, theirs = (self.op, self.args, self.index, self.kwargs), (other.op, other.args, other.index, other.kwargs)
        return ours[0] is theirs[0] and ours[1:] == theirs[1:]


def replayed(emit: Emit, view: View, source: Entry, had: TensorSpec, spec: TensorSpec) -> Entry:
    """The view, which was `spec` where its source was `had`, taken of `source`: the same elsewhere in memory."""
    if view.op in IDENTITIES:
        return source
    assert isinstance(source.spec, TensorSpec)
    shift = source.spec.offset - had.offset
    args = view.args
    if shift:
        step = shift * had.dtype.itemsize // spec.dtype.itemsize
        spec = TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset + step, spec.conj, spec.neg)
    if view.op is aten.as_strided.default and shift and len(args) > 2 and args[2] is not None:
        args = (args[0], args[1], args[2] + shift)
        if spec.is_static and args[2] < 0:
            raise past_the_edges()
    if view.op is aten.as_strided.default and _bits(spec) != _bits(had):  # not read from its own parent
        return with_bits(emit, emit(view.op, source, *args, spec=without_bits(spec)), spec, had)
    if view.index is None:
        return emit(view.op, source, *args, kwargs=view.kwargs, spec=spec)
    single = _single_output(view, had)
    if single is not None:
        return emit(single[0], source, *single[1], spec=spec)
    many = emit(view.op, source, *args, kwargs=view.kwargs)
    return emit(operator.getitem, many, view.index, spec=spec)


def _bits(spec: TensorSpec) -> tuple[bool, bool]:
    return spec.conj, spec.neg


def with_bits(emit: Emit, entry: Entry, one: TensorSpec, other: TensorSpec) -> Entry:
    """The entry conjugated or negated where just one of the two is."""
    for differs, op in ((one.conj != other.conj, aten._conj.default), (one.neg != other.neg, aten._neg_view.default)):
        entry = emit(op, entry) if differs else entry
    return entry


def _single_output(view: View, source: TensorSpec) -> tuple[Any, tuple[Any, ...]] | None:
    """A one-output operator for one output of unbind or split."""
    index = view.index
    assert index is not None
    if view.op is aten.unbind.int:
        return aten.select.int, (view.args[0] if view.args else 0, index)
    if view.op is aten.split.Tensor:
        size, dim = view.args[0], view.args[1] if len(view.args) > 1 else 0
        return aten.slice.Tensor, (dim, index * size, min((index + 1) * size, source.shape[dim]))
    if view.op is aten.split_with_sizes.default:
        sizes, dim = view.args[0], view.args[1] if len(view.args) > 1 else 0
        start = sum(sizes[:index])
        return aten.slice.Tensor, (dim, start, start + sizes[index])
    return None
