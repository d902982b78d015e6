"""View operators: how a view is written back into its base, and how it is taken again of a new base.

`write_back` returns the entry of the base with the viewed elements replaced. An output of several (`split`, `unbind`)
is a selection. Selections have scatter counterparts that keep the base's strides; rearrangements are undone by the
opposite one. A view with no rule here is written through its memory layout with `as_strided_scatter`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..._torch.ops import Kwargs
from ..._torch.symbols import Size
from ...graph.meta import TensorSpec
from ..tape.opinfo import IDENTITIES, take_data
from ..tape.origin import Made
from ..tape.tape import Entry
from .refusals import past_the_edges

aten = torch.ops.aten


class Emit(Protocol):
    """Appends an operator to the tape."""

    def __call__(
        self, target: object, *args: object, kwargs: dict[str, object] | None = None, spec: TensorSpec | None = None
    ) -> Entry: ...


Rule = Callable[[Emit, tuple[Any, ...], Entry, TensorSpec, Entry], Entry]


def _argument(args: tuple[object, ...], index: int, default: object) -> Any:
    return args[index] if len(args) > index else default


def _select(emit: Emit, args: tuple[object, ...], base: Entry, spec: TensorSpec, new: Entry) -> Entry:
    return emit(aten.select_scatter.default, base, new, args[1], args[2], spec=spec)


def _slice(emit: Emit, args: tuple[object, ...], base: Entry, spec: TensorSpec, new: Entry) -> Entry:
    dim, start = _argument(args, 1, 0), _argument(args, 2, None)
    end, step = _argument(args, 3, None), _argument(args, 4, 1)
    return emit(aten.slice_scatter.default, base, new, dim, start, end, step, spec=spec)


def _diagonal(emit: Emit, args: tuple[object, ...], base: Entry, spec: TensorSpec, new: Entry) -> Entry:
    offset, dim1, dim2 = _argument(args, 1, 0), _argument(args, 2, 0), _argument(args, 3, 1)
    return emit(aten.diagonal_scatter.default, base, new, offset, dim1, dim2, spec=spec)


def _transpose(emit: Emit, args: tuple[object, ...], _b: Entry, _s: TensorSpec, new: Entry) -> Entry:
    return emit(aten.transpose.int, new, args[1], args[2])


def _t(emit: Emit, _args: tuple[object, ...], _b: Entry, _s: TensorSpec, new: Entry) -> Entry:
    return emit(aten.t.default, new)


def _permute(emit: Emit, args: tuple[Any, ...], _b: Entry, spec: TensorSpec, new: Entry) -> Entry:
    rank = len(spec.shape)
    inverse = [0] * rank
    for to, source in enumerate(args[1]):
        inverse[source % rank] = to
    return emit(aten.permute.default, new, inverse)


def _unsqueeze(emit: Emit, args: tuple[Any, ...], _b: Entry, spec: TensorSpec, new: Entry) -> Entry:
    dim = args[1] % (len(spec.shape) + 1)
    return emit(aten.squeeze.dim, new, dim)


def _reshape(emit: Emit, _args: tuple[object, ...], _b: Entry, spec: TensorSpec, new: Entry) -> Entry:
    """Undo view, squeeze and the like: same elements, the base's shape."""
    assert isinstance(new.spec, TensorSpec)
    return emit(aten.view.default, _contiguous(emit, new), list(spec.shape))


def _contiguous(emit: Emit, new: Entry) -> Entry:
    assert isinstance(new.spec, TensorSpec)
    if math.prod(new.spec.shape) and not _is_contiguous(new.spec):
        return emit(aten.clone.default, new, kwargs={"memory_format": torch.contiguous_format})
    return new


def _identity(_e: Emit, _args: tuple[object, ...], _b: Entry, _s: TensorSpec, new: Entry) -> Entry:
    return new


def _view_dtype(emit: Emit, _args: tuple[object, ...], _b: Entry, spec: TensorSpec, new: Entry) -> Entry:
    assert isinstance(new.spec, TensorSpec)
    if any(stride % spec.dtype.itemsize for stride in new.spec.stride[:-1]):  # of dimensions of size 1 too
        new = emit(aten.clone.default, new, kwargs={"memory_format": torch.contiguous_format})
    return emit(aten.view.dtype, _contiguous(emit, new), spec.dtype)


def _as_complex(emit: Emit, _args: tuple[object, ...], _b: Entry, _s: TensorSpec, new: Entry) -> Entry:
    assert isinstance(new.spec, TensorSpec)
    return emit(aten.view_as_real.default, emit(aten.clone.default, new) if new.spec.conj else new)


def _as_real(emit: Emit, _args: tuple[object, ...], _b: Entry, _s: TensorSpec, new: Entry) -> Entry:
    return emit(aten.view_as_complex.default, _contiguous(emit, new))


def _with_bits_of(base: TensorSpec, emit: Emit, new: Entry) -> Entry:
    """Without the conjugate and negative bits that the base lacks: the written value becomes the base."""
    spec = new.spec
    assert isinstance(spec, TensorSpec)
    return emit(aten.clone.default, new) if (spec.conj, spec.neg) > (base.conj, base.neg) else new


def _conj(emit: Emit, _args: tuple[object, ...], _b: Entry, spec: TensorSpec, new: Entry) -> Entry:
    return _with_bits_of(spec, emit, emit(aten._conj.default, new))


def _neg(emit: Emit, _args: tuple[object, ...], _b: Entry, spec: TensorSpec, new: Entry) -> Entry:
    return _with_bits_of(spec, emit, emit(aten._neg_view.default, new))


def _is_contiguous(spec: TensorSpec) -> bool:
    expected: Size = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


_RULES: dict[object, Rule] = {
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.diagonal.default: _diagonal,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshape),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default), _reshape),
    aten.view.dtype: _view_dtype,
    aten.view_as_real.default: _as_real,
    aten.view_as_complex.default: _as_complex,
    aten._conj.default: _conj,
    aten._neg_view.default: _neg,
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default, take_data), _identity),
}


_SELECTIONS = {_select, _slice, _diagonal}


def is_bijection(op: object) -> bool:
    """Whether the view has all of its base's elements."""
    rule = _RULES.get(op)
    return rule is not None and rule not in _SELECTIONS


_LAYOUT_KEPT = {_transpose, _t, _permute, _identity, _conj, _neg}


def undone(view: Entry, copy: Entry) -> Entry | None:
    """The base of `view`, from a copy of the view; None where rearranging does not give the base."""
    rule = _RULES.get(view.target)
    base = view.args[0] if rule is not None else None
    if rule is None or not isinstance(base, Entry) or not isinstance(base.spec, TensorSpec):
        return None
    if rule not in _LAYOUT_KEPT and not (rule is _reshape and _is_contiguous(base.spec)):
        return None

    def emit(target: Any, *args: Any, kwargs: Kwargs | None = None, spec: TensorSpec | None = None) -> Entry:
        return Entry(target, args, kwargs or {}, spec or base.spec)

    return rule(emit, view.args, base, base.spec, copy)


def write_back(emit: Emit, view: View, base: Entry, base_spec: TensorSpec, view_spec: TensorSpec, new: Entry) -> Entry:
    """The base's entry after the view took the value `new`."""
    op, args = _single_output(view, base_spec)
    rule = _RULES.get(op)
    if rule is None:
        return write_memory(emit, base, base_spec, view_spec, new)
    if isinstance(base.spec, TensorSpec):  # scatters keep the place in memory that their base has
        base_spec = moved(base_spec, base.spec.offset)
    if rule in _SELECTIONS and (base_spec.conj or base_spec.neg):
        base_spec = without_bits(base_spec)  # they resolve them
    return rule(emit, (None, *args), base, base_spec, new)


def moved(spec: TensorSpec, offset: Size) -> TensorSpec:
    """The spec at a new place in memory."""
    if spec.offset is offset or spec.offset == offset:
        return spec
    return TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device, offset, spec.conj, spec.neg)


def without_bits(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)


def write_memory(emit: Emit, base: Entry, base_spec: TensorSpec, view_spec: TensorSpec, new: Entry) -> Entry:
    """The base's entry after the elements at the places `view_spec` gives took the values `new`."""
    for is_set, op in ((base_spec.conj, aten._conj.default), (base_spec.neg, aten._neg_view.default)):
        if is_set:  # PyTorch would resolve it, in memory of a new layout
            base, new = emit(op, base, spec=moved(without_bits(base_spec), _offset(base))), emit(op, new)
    if base_spec.conj or base_spec.neg:
        written = write_memory(emit, base, without_bits(base_spec), without_bits(view_spec), new)
        for is_set, op in ((base_spec.neg, aten._neg_view.default), (base_spec.conj, aten._conj.default)):
            written = emit(op, written, spec=moved(base_spec, _offset(written))) if is_set else written
        return written
    shape, stride = list(view_spec.shape), list(view_spec.stride)
    for dim in range(len(shape)):
        if stride[dim] == 0 and shape[dim] > 1:  # all elements are in one place, and alike
            new = emit(aten.slice.Tensor, new, dim, 0, 1)
            shape[dim] = 1
    if base.target is aten.view.dtype and _is_contiguous(base_spec):
        base = emit(aten.clone.default, base)  # the kernel takes no memory that ends within an element
    offset = _offset(base) + view_spec.offset - base_spec.offset
    spec = moved(base_spec, _offset(base))
    if not _is_contiguous(base_spec):
        base = emit(aten.detach.default, base)  # the kernel takes nothing else that requires grad
    return emit(aten.as_strided_scatter.default, base, new, shape, stride, offset, spec=spec)


def _offset(entry: Entry) -> Any:
    return entry.spec.offset if isinstance(entry.spec, TensorSpec) else 0


# -------------------------------------------------------------------- views taken again
# A view operator and its arguments, and how the view is taken again of the base's next value.


@dataclasses.dataclass(slots=True, eq=False)
class View:
    """A view operator applied to a value: `op(source, *args)`, output `index` of several when not None."""

    op: Any
    args: tuple[Any, ...]  # without the source
    kwargs: dict[str, Any]
    index: int | None
    call: object  # one object for all outputs of a call
    grad_enabled: bool
    _: dataclasses.KW_ONLY
    is_member: bool = False  # an input's place in a memory that inputs share
    made: Made | None = None  # the program's line, its autograd sequence number, the operator that was decomposed

    def is_same(self, other: View) -> bool:
        """Whether both give equal views of one tensor."""
        ours, theirs = (self.op, self.args, self.index, self.kwargs), (other.op, other.args, other.index, other.kwargs)
        return ours[0] is theirs[0] and ours[1:] == theirs[1:]


def replayed(emit: Emit, view: View, source: Entry, had: TensorSpec, spec: TensorSpec) -> Entry:
    """The view, `spec` for the source `had`, taken again of `source`: equal, elsewhere in memory."""
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
    op, args = _single_output(view, had)
    if op is not view.op:
        return emit(op, source, *args, spec=spec)
    many = emit(view.op, source, *args, kwargs=view.kwargs)
    return emit(operator.getitem, many, view.index, spec=spec)


def _bits(spec: TensorSpec) -> tuple[bool, bool]:
    return spec.conj, spec.neg


def with_bits(emit: Emit, entry: Entry, one: TensorSpec, other: TensorSpec) -> Entry:
    """The entry conjugated or negated where just one of the two is."""
    for differs, op in ((one.conj != other.conj, aten._conj.default), (one.neg != other.neg, aten._neg_view.default)):
        entry = emit(op, entry) if differs else entry
    return entry


def _single_output(view: View, source: TensorSpec) -> tuple[object, tuple[Any, ...]]:
    """A one-output operator for one output of unbind or split, and its arguments; any other view's own."""
    index, args = view.index, view.args
    if index is None:
        return view.op, args
    if view.op is aten.unbind.int:
        return aten.select.int, (args[0] if args else 0, index)
    if view.op is aten.split.Tensor:
        size, dim = args[0], args[1] if len(args) > 1 else 0
        return aten.slice.Tensor, (dim, index * size, min((index + 1) * size, source.shape[dim]))
    if view.op is aten.split_with_sizes.default:
        sizes, dim = args[0], args[1] if len(args) > 1 else 0
        start = sum(sizes[:index])
        return aten.slice.Tensor, (dim, start, start + sizes[index])
    return view.op, args
