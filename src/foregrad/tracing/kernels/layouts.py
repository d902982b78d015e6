"""The layouts of common results, from the arguments' layouts: no kernel runs.

FakeTensor works out some operators through Python decompositions, at 1 to 14 ms a call: normalisations, softmaxes,
their backwards. On plain arguments (contiguous, floating, of one dtype and device) their results are plain too, and a
line says how. A rule that meets anything else gives None, and the kernels are asked; so a rule never has to raise.
Every rule is held against the kernels over PyTorch's operator database by `tests/unit/test_metadata.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..._torch.ops import Args, Kwargs
from ..._torch.symbols import Size, is_product_of_sizes, is_symbolic, map_symbolic
from ...graph.meta import TensorSpec, contiguous_strides

aten = torch.ops.aten

Specs = Sequence[TensorSpec]
# Takes the specs of the tensors among the arguments, in order, and the arguments.
Rule = Callable[[Specs, Args, Kwargs], Any]


def layout_of(op: object, specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """The spec of the operator's result, a tuple of specs for several, or None where no rule applies."""
    rule, of_one = RULES.get(op), _OF_ONE.get(op)
    if of_one is not None and specs:
        try:
            return of_one(specs[0], *args[1:], **kwargs)
        except (_UnknownError, TypeError):  # a signature that the rule has not
            return None
    if op in _ARITHMETIC and len(specs) == 1 and specs[0].dtype.is_floating_point:
        found = _iterated(specs, args, kwargs)
        if found is not None:
            return found
    if rule is None or not specs or not _are_alike(specs, op in _WITH_INDICES):
        return None
    if op in _ANY_STRIDES or all(s.stride == contiguous_strides(s.shape) for s in specs):
        found = rule(specs, args, kwargs)
        if found is not None:
            return found
    if op not in _ARITHMETIC and (op not in _POINTWISE or len(specs) > 1):
        return None
    # For operands of one shape the iterator has shortcuts, told from strides that mean nothing at sizes of one.
    return None if 1 in specs[0].shape and len({s.shape for s in specs}) == 1 else _iterated(specs, args, kwargs)


def _are_alike(specs: Specs, with_indices: bool) -> bool:
    floating = [s for s in specs if s.dtype is not torch.int64] if with_indices else specs
    dtypes, devices = ({getattr(s, name) for s in group} for name, group in (("dtype", floating), ("device", specs)))
    return dtypes in ({torch.float32}, {torch.float64}) and len(devices) == 1 and all(0 not in s.shape for s in specs)


def _are_numbers(args: Args, kwargs: Kwargs) -> bool:
    """Whether the arguments besides tensors are numbers, or names of a way to compute."""
    others = (a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor))
    return all(type(a) in (int, float, bool, str) for a in others)


def _pointwise(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """One shape in and out; numbers besides don't change the dtype of floating tensors."""
    first = specs[0]
    if any(s.shape != first.shape for s in specs):
        return None
    return first.fresh(first.shape) if _are_numbers(args, kwargs) else None


def _iterated(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> TensorSpec | None:
    """An operator on the elements of tensors with any strides: PyTorch's iterator sorts the dimensions by the strides.

    FakeTensor takes a number for no operand, and gives channels-last strides to a batch of one that is not.
    """
    if not _are_numbers(args, kwargs) or any(type(n) is not int or n == 0 for s in specs for n in s.shape):
        return None
    try:
        shape = torch.broadcast_shapes(*(s.shape for s in specs))
    except RuntimeError:
        return None
    order = list(reversed(range(len(shape))))  # the innermost first
    for at in range(1, len(order)):
        for before in reversed(range(at)):
            found = _compared(specs, shape, order[before], order[at])
            if found < 0:
                break
            if found > 0:
                order[before], order[at], at = order[at], order[before], before
    strides: list[Size] = [0] * len(order)
    elements: Size = 1
    for dim in order:
        strides[dim], elements = elements, elements * shape[dim]
    return specs[0].fresh(shape, strides)


def _compared(specs: Specs, shape: Sequence[int], inner: int, outer: int) -> Any:
    """Positive if the dimension `inner` must come further out than `outer`, negative if it comes before."""
    for spec in specs:
        missing = len(shape) - len(spec.shape)
        a, b = (
            0 if dim < missing or spec.shape[dim - missing] != shape[dim] else spec.stride[dim - missing]
            for dim in (inner, outer)
        )
        if a and b and (a != b or shape[inner] > shape[outer]):
            return a - b or 1
    return 0


def _embedding(specs: Specs, args: Args, kwargs: Kwargs) -> TensorSpec | None:
    weight, indices = specs
    is_fitting = indices.dtype is torch.int64 and len(weight.shape) == 2 and not kwargs
    return weight.fresh((*indices.shape, weight.shape[1])) if is_fitting else None


def _embedding_backward(specs: Specs, args: Args, kwargs: Kwargs) -> TensorSpec | None:
    grad, indices = specs
    is_fitting = indices.dtype is torch.int64 and len(args) == 5 and not kwargs and grad.shape[:-1] == indices.shape
    return grad.fresh((args[2], grad.shape[-1])) if is_fitting else None


def _nll_loss(specs: Specs, args: Args, kwargs: Kwargs) -> object:
    """Of the mean or sum over a batch; of the backward too, whose arguments begin with the gradient."""
    at = int(len(args) == 7)
    if kwargs or len(args) not in (5, 7) or args[2 + at] is not None or args[3 + at] not in (1, 2):
        return None
    x, target, *scalars = *specs[at : at + 2], *specs[:at], *specs[at + 2 :]
    is_fitting = target.dtype is torch.int64 and len(x.shape) == 2 and target.shape == x.shape[:1]
    if not is_fitting or any(scalar.shape for scalar in scalars):
        return None
    return x.fresh(x.shape) if at else (x.fresh(()), x.fresh(()))


def _slice_backward(specs: Specs, args: Any, _: object) -> TensorSpec | None:
    if len(args) != 6:
        return None
    (grad,), (_, sizes, dim, *bounds) = specs, args
    if any(type(n) is not int for n in (*sizes, *grad.shape, *bounds)) or bounds[2] < 1 or not _is_dim(dim, grad):
        return None
    shape = [len(range(n)[slice(*bounds)]) if at == dim % len(sizes) else n for at, n in enumerate(sizes)]
    return grad.fresh(sizes) if shape == list(grad.shape) else None


def _softmax_backward(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    first = specs[0]
    if len(args) != 4 or kwargs or args[3] is not first.dtype or specs[1].shape != first.shape:
        return None
    return first.fresh(first.shape) if _is_dim(args[2], first) else None


def _softmax(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    first = specs[0]
    if len(args) not in (2, 3) or kwargs or (len(args) == 3 and args[2] not in (False, None)):
        return None
    return first.fresh(first.shape) if _is_dim(args[1], first) else None


def _is_dim(dim: Any, spec: TensorSpec) -> bool:
    rank = len(spec.shape)
    return type(dim) is int and -rank <= dim < rank


def _mm(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> TensorSpec | None:
    a, b = specs
    if kwargs or len(args) != 2 or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return None
    return a.fresh((a.shape[0], b.shape[1]))


def _addmm(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    if len(args) != 3 or kwargs:
        return None
    product = _mm(specs[1:], args[1:], kwargs)
    return product if product is not None and specs[0].shape == product.shape[1:] else None


def _bmm(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    a, b = specs
    if kwargs or len(args) != 2 or len(a.shape) != 3 or len(b.shape) != 3:
        return None
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return None
    return a.fresh((a.shape[0], a.shape[1], b.shape[2]))


def _layer_norm(specs: Specs, args: Args, kwargs: Kwargs) -> object:
    x = specs[0]
    if len(args) != 5 or kwargs or not _is_normalised(x, args[1], specs[1:]):
        return None
    count = len(args[1])
    statistics = x.fresh((*x.shape[: len(x.shape) - count], *[1] * count))
    return x.fresh(x.shape), statistics, statistics


def _layer_norm_backward(specs: Specs, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> object:
    if len(args) != 8 or kwargs or len(specs) != 6 or list(args[7]) != [True, True, True]:
        return None
    grad, x, mean, _, weight, bias = specs
    count = len(args[2])
    expected = (*x.shape[: len(x.shape) - count], *[1] * count)
    if grad.shape != x.shape or mean.shape != expected or not _is_normalised(x, args[2], (weight, bias)):
        return None
    return x.fresh(x.shape), x.fresh(weight.shape), x.fresh(bias.shape)


def _is_normalised(x: TensorSpec, shape: Any, parameters: Specs) -> bool:
    shape = tuple(shape)
    return bool(shape) and x.shape[-len(shape) :] == shape and all(p.shape == shape for p in parameters)


def _batch_norm(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    x = specs[0]
    if len(args) != 8 or kwargs or args[5] is not True or not _has_channels(x, specs[1:]) or x.device.type != "cpu":
        return None
    statistics = x.fresh(x.shape[1:2])
    return x.fresh(x.shape), statistics, statistics


def _batch_norm_backward(specs: Specs, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> object:
    if len(args) != 10 or kwargs or args[7] is not True or list(args[9]) != [True, True, True]:
        return None
    grad, x = specs[0], specs[1]
    if args[2] is None or grad.shape != x.shape or not _has_channels(x, specs[2:]) or x.device.type != "cpu":
        return None
    channels = x.fresh(x.shape[1:2])
    return x.fresh(x.shape), channels, channels


def _convolved(x: TensorSpec, weight: TensorSpec, options: Sequence[Any]) -> TensorSpec | None:
    """The result of a convolution; `options`: stride, padding, dilation, transposed, output padding, groups."""
    stride, padding, dilation, transposed, _, groups = options
    spatial = x.shape[2:]
    if transposed or x.device.type != "cpu" or not 1 <= len(spatial) <= 3 or len(weight.shape) != len(x.shape):
        return None
    if any(len(numbers) != len(spatial) for numbers in (stride, padding, dilation)):
        return None
    if min(*stride, *dilation, groups) < 1 or min(padding) < 0:
        return None
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        return None
    numbers = zip(spatial, weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in numbers]
    return x.fresh((x.shape[0], weight.shape[0], *sizes)) if min(sizes) > 0 else None


def _convolution(specs: Specs, args: tuple[object, ...], kwargs: dict[str, object]) -> TensorSpec | None:
    if len(args) != 9 or kwargs or any(bias.shape != specs[1].shape[:1] for bias in specs[2:]):
        return None
    return _convolved(specs[0], specs[1], args[3:])


def _convolution_backward(specs: Specs, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 11 or kwargs:
        return None
    grad, x, weight = specs
    out, of_bias = _convolved(x, weight, args[4:10]), weight.shape[:1]
    if out is None or out.shape != grad.shape or (args[10][2] and tuple(args[3] or ()) != of_bias):
        return None
    shapes = zip((x.shape, weight.shape, of_bias), args[10], strict=True)
    return tuple(x.fresh(shape) if is_wanted else None for shape, is_wanted in shapes)


def _has_channels(x: TensorSpec, parameters: Specs) -> bool:
    return len(x.shape) > 2 and all(p.shape == x.shape[1:2] for p in parameters)


_ARITHMETIC = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor,
    aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar,
)  # fmt: skip
_ANY_STRIDES = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.slice_backward.default,
    aten.embedding.default, aten.embedding_dense_backward.default,
}  # fmt: skip
_WITH_INDICES: dict[object, Rule] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss_backward.default), _nll_loss),
}

_POINTWISE = (
    *_ARITHMETIC, aten.neg.default, aten.exp.default,
    aten.sin.default, aten.cos.default, aten.sqrt.default, aten.rsqrt.default,
    aten.relu.default, aten.threshold_backward.default, aten.tanh.default, aten.tanh_backward.default,
    aten.sigmoid.default, aten.sigmoid_backward.default, aten.gelu.default, aten.gelu_backward.default,
    aten.silu.default, aten.silu_backward.default, aten.pow.Tensor_Scalar,
)  # fmt: skip

RULES: dict[object, Rule] = {
    **_WITH_INDICES,
    **dict.fromkeys((*_POINTWISE, aten.bernoulli.p, aten.empty_like.default), _pointwise),
    aten.slice_backward.default: _slice_backward,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default), _softmax),
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}


# -------------------------------------------------------------------- of symbolic sizes
# The layouts of results with symbolic sizes, told from the arguments' layouts: no kernel runs and no guard is made.
#
# FakeTensor takes 1 to 20 ms for each operator on symbolic sizes. Most sizes are products of plain numbers and symbols
# that are two or more. For such sizes the rules above hold: a rule asks only whether sizes are equal, and leaves
# further questions to the kernels. Here a rule is given sizes that are equal if their expressions are equal. Views have
# rules of their own, which a static capture does not need.


class _UnknownError(Exception):
    """A size that may be 0 or 1, or a question that can't be answered for every size."""


class _Size:
    """A symbolic size of two or more, equal only to sizes of equal expression."""

    __slots__ = ("expression", "number")

    def __init__(self, number: Any) -> None:
        self.number = number if type(number) is torch.SymInt else torch.SymInt(number.node)
        self.expression = number.node.expr

    def __eq__(self, other: object) -> bool:
        return type(other) is _Size and bool(self.expression == other.expression)

    def __hash__(self) -> int:
        return hash(self.expression)

    def __mul__(self, other: Any) -> object:
        if type(other) is _Size:
            return _Size(self.number * other.number)
        return other if other == 0 else self if other == 1 else _Size(self.number * other)

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:
        if type(other) is int and other <= 2:
            return False
        raise _UnknownError


def _wrapped(number: object) -> Any:
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


def _unwrapped(number: object) -> Any:
    return number.number if type(number) is _Size else number


def _plain(value: Any) -> Any:
    """The spec, or the tuple of specs, with numbers again."""
    if not isinstance(value, TensorSpec):
        return value if value is None else tuple(map(_plain, value))
    shape, stride = (tuple(map(_unwrapped, row)) for row in (value.shape, value.stride))
    return TensorSpec(shape, stride, value.dtype, value.device, _unwrapped(value.offset))


def result_layout(op: object, specs: Sequence[TensorSpec], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """As `layout_of`, of arguments with symbolic sizes."""
    if op not in RULES and op not in _OF_ONE:
        return None
    try:
        wrapped = list(map(_wrapped_spec, specs))
        return _plain(layout_of(op, wrapped, map_symbolic(args, _wrapped), map_symbolic(kwargs, _wrapped)))
    except (_UnknownError, TypeError):  # a signature that no rule here has
        return None


def view_layout(op: object, spec: TensorSpec, args: tuple[object, ...], kwargs: dict[str, object]) -> TensorSpec | None:
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


def _is_contiguous(spec: TensorSpec) -> bool:
    return 0 not in spec.shape and spec.stride == contiguous_strides(spec.shape)


def _clone(spec: TensorSpec, *, memory_format: object = None) -> TensorSpec | None:
    if 0 in spec.shape or not (memory_format is torch.contiguous_format or _is_contiguous(spec)):
        return None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return None
    return spec.fresh(spec.shape)


def _sum(spec: TensorSpec, dims: Any, keepdim: bool = False) -> TensorSpec | None:
    if not dims or not spec.dtype.is_floating_point or not _is_contiguous(spec):
        return None
    summed = {_dim(spec, dim) for dim in dims}
    if len(summed) != len(dims):
        return None
    shape = [1 if dim in summed else size for dim, size in enumerate(spec.shape) if keepdim or dim not in summed]
    return spec.fresh(shape)


_OF_ONE: dict[object, Callable[..., object]] = {
    aten.clone.default: _clone,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _sum,
}

# ------------------------------------------------------------------------------------------------ views


def _dim(spec: TensorSpec, dim: Any, more: int = 0) -> int:
    rank = len(spec.shape) + more
    if type(dim) is not int or not -rank <= dim < rank:
        raise _UnknownError
    return dim % rank


def _over(spec: TensorSpec, shape: Sequence[Size], stride: Sequence[Size]) -> TensorSpec:
    return TensorSpec(tuple(shape), tuple(stride), spec.dtype, spec.device, spec.offset)


def _same(spec: TensorSpec) -> TensorSpec:
    return spec


def _permute(spec: TensorSpec, dims: Sequence[object]) -> TensorSpec | None:
    order = [_dim(spec, dim) for dim in dims]
    if sorted(order) != list(range(len(spec.shape))):
        return None
    return _over(spec, [spec.shape[dim] for dim in order], [spec.stride[dim] for dim in order])


def _transpose(spec: TensorSpec, first: object, second: object) -> TensorSpec | None:
    order = list(range(len(spec.shape)))
    a, b = _dim(spec, first), _dim(spec, second)
    order[a], order[b] = b, a
    return _permute(spec, order)


def _unsqueeze(spec: TensorSpec, dim: object) -> TensorSpec:
    at = _dim(spec, dim, 1)
    step = spec.shape[at] * spec.stride[at] if at < len(spec.shape) else 1
    return _over(spec, (*spec.shape[:at], 1, *spec.shape[at:]), (*spec.stride[:at], step, *spec.stride[at:]))


def _expand(spec: TensorSpec, size: Sequence[Size], *, implicit: bool = False) -> TensorSpec | None:
    new = len(size) - len(spec.shape)
    if new < 0:
        return None
    stride: list[Size] = []
    shape: list[Size] = []
    for dim, wanted in enumerate(size):
        if dim < new:
            if wanted in (1, -1):
                return None
            step: Size = 0
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


def _view(spec: TensorSpec, size: Sequence[Size]) -> TensorSpec | None:
    if 1 in size or 1 in spec.shape or not _is_contiguous(spec):
        return None
    count: Size = 1
    for have in spec.shape:
        count = count * have
    wanted: Size = 1
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


_VIEWS: dict[object, Callable[..., TensorSpec | None]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.t.default: lambda spec: _transpose(spec, 0, 1) if len(spec.shape) == 2 else None,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
