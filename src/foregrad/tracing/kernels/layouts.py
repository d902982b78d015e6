"""The layouts of common results, told from those of the arguments: no kernel runs.

FakeTensor works out some operators through Python decompositions, at 1 to 14 ms a call: normalisations, softmaxes,
their backwards. On plain arguments (contiguous, floating, of one dtype and device) their results are plain too, and a
line says how. A rule that meets anything else gives None, and the kernels are asked; so a rule never has to raise.
Every rule is held against the kernels over PyTorch's operator database by `tests/unit/test_metadata.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.meta import TensorSpec, contiguous_strides

__all__ = ["RULES", "layout_of"]

aten = torch.ops.aten

Specs = Sequence[TensorSpec]
# Takes the specs of the tensors among the arguments, in order, and the arguments.
Rule = Callable[[Specs, tuple[Any, ...], dict[str, Any]], Any]


def layout_of(op: Any, specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The spec of the operator's result, a tuple of them for several, or None where no rule applies."""
    rule = RULES.get(op)
    if op in _ARITHMETIC and len(specs) == 1 and specs[0].dtype.is_floating_point:
        return _with_number(specs[0], args, kwargs)
    if rule is None or not specs or not _are_alike(specs):
        return None
    if op not in _ANY_STRIDES and not all(s.stride == contiguous_strides(s.shape) for s in specs):
        return None
    return rule(specs, args, kwargs)


def _are_alike(specs: Specs) -> bool:
    first = specs[0]
    if first.dtype not in (torch.float32, torch.float64):
        return False
    return all(s.dtype is first.dtype and s.device == first.device and 0 not in s.shape for s in specs)


def _new(shape: Sequence[int], like: TensorSpec) -> TensorSpec:
    return TensorSpec(tuple(shape), contiguous_strides(shape), like.dtype, like.device)


_NUMBERS = (int, float, bool, str)


def _pointwise(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One shape in, the same out; numbers besides don't change the dtype of floating tensors."""
    first = specs[0]
    if any(s.shape != first.shape for s in specs):
        return None
    others = [a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor)]
    if any(type(a) not in _NUMBERS for a in others):
        return None
    return _new(first.shape, first)


def _with_number(spec: TensorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorSpec | None:
    """Arithmetic with a number, which has no shape: PyTorch's iterator then sorts the dimensions by their strides.

    FakeTensor takes the number for no operand, and gives channels-last strides to a batch of one that is not.
    """
    others = [a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor)]
    if (
        0 in (*spec.shape, *spec.stride)
        or any(type(n) is not int for n in (*spec.shape, *spec.stride))
        or any(type(a) not in _NUMBERS for a in others)
    ):
        return None
    order = list(reversed(range(len(spec.shape))))  # the innermost first
    for at in range(1, len(order)):
        for before in reversed(range(at)):
            inner, outer = order[before], order[before + 1]
            if spec.stride[inner] < spec.stride[outer]:
                break
            if (spec.stride[inner], spec.shape[inner]) > (spec.stride[outer], spec.shape[outer]):
                order[before], order[before + 1] = outer, inner
    strides, elements = [0] * len(order), 1
    for dim in order:
        strides[dim], elements = elements, elements * spec.shape[dim]
    return TensorSpec(spec.shape, tuple(strides), spec.dtype, spec.device)


def _softmax_backward(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = specs[0]
    if len(args) != 4 or kwargs or args[3] is not first.dtype or specs[1].shape != first.shape:
        return None
    return _new(first.shape, first) if _is_dim(args[2], first) else None


def _softmax(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = specs[0]
    if len(args) not in (2, 3) or kwargs or (len(args) == 3 and args[2] not in (False, None)):
        return None
    return _new(first.shape, first) if _is_dim(args[1], first) else None


def _is_dim(dim: Any, spec: TensorSpec) -> bool:
    rank = len(spec.shape)
    return type(dim) is int and -rank <= dim < rank


def _mm(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = specs
    if kwargs or len(args) != 2 or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return None
    return _new((a.shape[0], b.shape[1]), a)


def _addmm(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or kwargs:
        return None
    product = _mm(specs[1:], args[1:], kwargs)
    return product if product is not None and specs[0].shape == product.shape[1:] else None


def _bmm(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = specs
    if kwargs or len(args) != 2 or len(a.shape) != 3 or len(b.shape) != 3:
        return None
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return None
    return _new((a.shape[0], a.shape[1], b.shape[2]), a)


def _layer_norm(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = specs[0]
    if len(args) != 5 or kwargs or not _is_normalised(x, args[1], specs[1:]):
        return None
    count = len(args[1])
    statistics = _new((*x.shape[: len(x.shape) - count], *[1] * count), x)
    return _new(x.shape, x), statistics, statistics


def _layer_norm_backward(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 8 or kwargs or len(specs) != 6 or list(args[7]) != [True, True, True]:
        return None
    grad, x, mean, _, weight, bias = specs
    count = len(args[2])
    expected = (*x.shape[: len(x.shape) - count], *[1] * count)
    if grad.shape != x.shape or mean.shape != expected or not _is_normalised(x, args[2], (weight, bias)):
        return None
    return _new(x.shape, x), _new(weight.shape, x), _new(bias.shape, x)


def _is_normalised(x: TensorSpec, shape: Any, parameters: Specs) -> bool:
    shape = tuple(shape)
    return bool(shape) and x.shape[-len(shape) :] == shape and all(p.shape == shape for p in parameters)


def _batch_norm(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = specs[0]
    if len(args) != 8 or kwargs or args[5] is not True or not _has_channels(x, specs[1:]) or x.device.type != "cpu":
        return None
    statistics = _new(x.shape[1:2], x)
    return _new(x.shape, x), statistics, statistics


def _batch_norm_backward(specs: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 10 or kwargs or args[7] is not True or list(args[9]) != [True, True, True]:
        return None
    grad, x = specs[0], specs[1]
    if args[2] is None or grad.shape != x.shape or not _has_channels(x, specs[2:]) or x.device.type != "cpu":
        return None
    channels = _new(x.shape[1:2], x)
    return _new(x.shape, x), channels, channels


def _has_channels(x: TensorSpec, parameters: Specs) -> bool:
    return len(x.shape) > 2 and all(p.shape == x.shape[1:2] for p in parameters)


_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
_ANY_STRIDES = {aten.mm.default, aten.addmm.default, aten.bmm.default}

_POINTWISE = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.add.Scalar,
    aten.neg.default, aten.exp.default, aten.sin.default, aten.cos.default, aten.sqrt.default, aten.rsqrt.default,
    aten.relu.default, aten.threshold_backward.default, aten.tanh.default, aten.tanh_backward.default,
    aten.sigmoid.default, aten.sigmoid_backward.default, aten.gelu.default, aten.gelu_backward.default,
    aten.silu.default, aten.silu_backward.default, aten.pow.Tensor_Scalar,
)  # fmt: skip

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
