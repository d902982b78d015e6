"""The layouts of results with symbolic sizes, told from those of the arguments: no kernel runs and no guard is made.

FakeTensor takes 1 to 20 ms for each operator on symbolic sizes. Most sizes are products of plain numbers and symbols
that are two or more. For those the rules of `layouts.py` hold: they ask only whether sizes are the same, and leave to
the kernels what is not. Here they are given sizes that are the same if their expressions are. Views have rules of
their own, which a static capture does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._torch.symbols import is_product_of_sizes, is_symbolic, map_symbolic
from ...graph.meta import TensorSpec, contiguous_strides
from .layouts import RULES, layout_of

__all__ = ["result_layout", "view_layout"]

aten = torch.ops.aten


class _UnknownError(Exception):
    """A size that may be 0 or 1, or a question that can't be answered for every size."""


class _Size:
    """A symbolic size of two or more that is equal only to what has the same expression."""

    __slots__ = ("expression", "number")

    def __init__(self, number: Any) -> None:
        self.number = number if type(number) is torch.SymInt else torch.SymInt(number.node)
        self.expression = number.node.expr

    def __eq__(self, other: object) -> bool:
        return type(other) is _Size and bool(self.expression == other.expression)

    def __hash__(self) -> int:
        return hash(self.expression)

    def __mul__(self, other: Any) -> Any:
        if type(other) is _Size:
            return _Size(self.number * other.number)
        return other if other == 0 else self if other == 1 else _Size(self.number * other)

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:
        if type(other) is int and other <= 2:
            return False
        raise _UnknownError


def _wrapped(number: Any) -> Any:
    if not is_symbolic(number):
        return number
    if not is_product_of_sizes(number):
        raise _UnknownError
    return _Size(number)


def _wrapped_spec(spec: TensorSpec) -> TensorSpec:
    if spec.conj or spec.neg:
        raise _UnknownError
    shape, stride = tuple(map(_wrapped, spec.shape)), tuple(map(_wrapped, spec.stride))
    return TensorSpec(shape, stride, spec.dtype, spec.device, _wrapped(spec.offset))


def _plain(value: Any) -> Any:
    """The spec, or the tuple of them, with numbers again."""
    if not isinstance(value, TensorSpec):
        return value if value is None else tuple(map(_plain, value))
    shape, stride = (tuple(n.number if type(n) is _Size else n for n in row) for row in (value.shape, value.stride))
    offset = value.offset.number if type(value.offset) is _Size else value.offset
    return TensorSpec(shape, stride, value.dtype, value.device, offset)


def result_layout(op: Any, specs: Sequence[TensorSpec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `layout_of`, of arguments with symbolic sizes."""
    rule = _RULES.get(op)
    if rule is None and op not in RULES:
        return None
    try:
        wrapped = list(map(_wrapped_spec, specs))
        args, kwargs = map_symbolic(args, _wrapped), map_symbolic(kwargs, _wrapped)
        if rule is not None:
            return _plain(rule(wrapped[0], *args[1:], **kwargs))
        return _plain(layout_of(op, wrapped, args, kwargs))
    except (_UnknownError, TypeError):  # a signature that no rule here has
        return None


def view_layout(op: Any, spec: TensorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorSpec | None:
    """The layout of a view of one tensor with symbolic sizes, or None where no rule applies."""
    rule = _VIEWS.get(op)
    if rule is None:
        return None
    try:
        made = rule(_wrapped_spec(spec), *map_symbolic(args[1:], _wrapped), **map_symbolic(kwargs, _wrapped))
        return None if made is None else _plain(made)
    except (_UnknownError, TypeError):
        return None


# ------------------------------------------------------------------------------------------------ new tensors


def _new(spec: TensorSpec, shape: Sequence[Any]) -> TensorSpec:
    return TensorSpec(tuple(shape), contiguous_strides(shape), spec.dtype, spec.device)


def _is_contiguous(spec: TensorSpec) -> bool:
    return 0 not in spec.shape and spec.stride == contiguous_strides(spec.shape)


def _clone(spec: TensorSpec, *, memory_format: Any = None) -> TensorSpec | None:
    if 0 in spec.shape or not (memory_format is torch.contiguous_format or _is_contiguous(spec)):
        return None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    return _new(spec, spec.shape)


def _sum(spec: TensorSpec, dims: Any, keepdim: bool = False) -> TensorSpec | None:
    if not dims or not spec.dtype.is_floating_point or not _is_contiguous(spec):
        return None
    summed = {_dim(spec, dim) for dim in dims}
    if len(summed) != len(dims):
        return None
    shape = [1 if dim in summed else size for dim, size in enumerate(spec.shape) if keepdim or dim not in summed]
    return _new(spec, shape)


_RULES: dict[Any, Callable[..., Any]] = {aten.clone.default: _clone, aten.sum.dim_IntList: _sum}

# ------------------------------------------------------------------------------------------------ views


def _dim(spec: TensorSpec, dim: Any, more: int = 0) -> int:
    rank = len(spec.shape) + more
    if type(dim) is not int or not -rank <= dim < rank:
        raise _UnknownError
    return dim % rank


def _over(spec: TensorSpec, shape: Sequence[Any], stride: Sequence[Any]) -> TensorSpec:
    return TensorSpec(tuple(shape), tuple(stride), spec.dtype, spec.device, spec.offset)


def _same(spec: TensorSpec) -> TensorSpec:
    return spec


def _permute(spec: TensorSpec, dims: Sequence[Any]) -> TensorSpec | None:
    order = [_dim(spec, dim) for dim in dims]
    if sorted(order) != list(range(len(spec.shape))):
        return None
    return _over(spec, [spec.shape[dim] for dim in order], [spec.stride[dim] for dim in order])


def _transpose(spec: TensorSpec, first: Any, second: Any) -> TensorSpec | None:
    order = list(range(len(spec.shape)))
    a, b = _dim(spec, first), _dim(spec, second)
    order[a], order[b] = b, a
    return _permute(spec, order)


def _t(spec: TensorSpec) -> TensorSpec | None:
    return _transpose(spec, 0, 1) if len(spec.shape) == 2 else None


def _unsqueeze(spec: TensorSpec, dim: Any) -> TensorSpec:
    at = _dim(spec, dim, 1)
    step = spec.shape[at] * spec.stride[at] if at < len(spec.shape) else 1
    return _over(spec, (*spec.shape[:at], 1, *spec.shape[at:]), (*spec.stride[:at], step, *spec.stride[at:]))


def _expand(spec: TensorSpec, size: Sequence[Any], *, implicit: bool = False) -> TensorSpec | None:
    new = len(size) - len(spec.shape)
    if new < 0:
        return None
    stride: list[Any] = []
    shape: list[Any] = []
    for dim, wanted in enumerate(size):
        if dim < new:
            if wanted in (1, -1):
                return None
            step = 0
        else:
            have, step = spec.shape[dim - new], spec.stride[dim - new]
            if wanted in (-1, have):
                wanted = have
            elif have == 1 and wanted != 0:
                step = 0
            else:
                return None
        shape.append(wanted)
        stride.append(step)
    return _over(spec, shape, stride)


def _view(spec: TensorSpec, size: Sequence[Any]) -> TensorSpec | None:
    if 1 in size or 1 in spec.shape or not _is_contiguous(spec):
        return None
    count: Any = 1
    for have in spec.shape:
        count = count * have
    wanted: Any = 1
    for dim in size:
        if dim != -1:
            wanted = wanted * dim
    shape = list(size)
    if -1 in shape:
        rest = _quotient(count, wanted)
        if rest is None or rest == 1:
            return None
        shape[shape.index(-1)] = rest
    elif wanted != count:
        return None
    return _over(spec, shape, contiguous_strides(shape))


def _quotient(count: Any, part: Any) -> Any:
    """`count / part` where every size of the symbols divides."""
    if type(count) is not _Size:
        return count // part if type(part) is int and count % part == 0 else None
    found = count.number // (part.number if type(part) is _Size else part)
    plain: Any = found.node.maybe_as_int() if is_symbolic(found) else found
    if plain is None:
        if not is_product_of_sizes(found):
            return None
        plain = _Size(found)
    return plain if part * plain == count else None


_VIEWS: dict[Any, Callable[..., TensorSpec | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
