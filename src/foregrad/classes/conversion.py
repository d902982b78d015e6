"""The two differentiable steps at the ends of compiled graphs: a wrapper to its plain tensors, and back.

Autograd sees the wrapper outside and plain tensors inside. The class decides on the gradient that goes through: a
wrapper like the result, perhaps of other metadata, or a plain tensor (see `WrapperSpec.is_whole`).
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import engine
from .._torch.dynamo_off import dynamo_off
from .._torch.engine import hand_over, plain_execution, take_handed
from .._torch.wrappers import is_wrapper, parts_of
from ..errors import UnsupportedTensorError
from ..identity import ById
from ._torch.jagged import is_jagged
from .spec import Carrier, WrapperSpec, rebuilt, spec_of

Parts = Sequence["torch.Tensor | None"]
Take = Callable[[Any], "Parts | None"]  # the gradient of a wrapper, as a gradient for each plain tensor
Layout = tuple[torch.Size, torch.dtype] | None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wrapper: Any, spec: WrapperSpec, gradient: WrapperSpec) -> Any:
        ctx.set_materialize_grads(False)
        all_parts = parts_of(wrapper)
        if spec.is_whole:
            return _without_elements(spec, all_parts)
        ctx.gradient = gradient
        kept = zip(spec.paths(), all_parts, spec.carries, strict=False)
        ctx.kept = {path: part for path, part, carries in kept if not carries}
        pairs = zip(all_parts, spec.carries, strict=True)
        parts = tuple(c.make() for c in spec.carriers) or tuple(part.detach() for part, carries in pairs if carries)
        ctx.layouts = [(part.shape, part.dtype, part.device) for part in parts]
        return parts

    @staticmethod
    @dynamo_off()  # the probe would look into the work of a wrapper's class
    def backward(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            handed = take_handed(ctx)
            return handed[0][1] if handed else None, None, None
        if not hasattr(ctx, "kept"):
            return gradients[0], None, None
        pairs = zip(gradients, ctx.layouts, strict=True)
        filled = (torch.zeros(like[0], dtype=like[1], device=like[2]) if g is None else g for g, like in pairs)
        spec = ctx.gradient
        parts = [
            next(filled) if carries else ctx.kept[path]
            for path, carries in zip(spec.paths(), spec.carries, strict=False)
        ]
        return wrap(spec, parts), None, None


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: WrapperSpec, take: Take, *parts: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.take, ctx.layouts = take, layouts_of(parts)
        # A part without gradients stays one object: the ragged size of a tensor is tied to its offsets.
        pairs = zip(parts, spec.carries, strict=False)
        return rebuilt(spec, [part.detach() if carries else part for part, carries in pairs])

    @staticmethod
    @dynamo_off()  # the probe would look into the work of a wrapper's class
    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *taken_by(ctx.take, gradient, ctx.layouts, ctx.next_functions)


_unwrap, _wrap = engine.direct_apply(_Unwrap), engine.direct_apply(_Wrap)


def unwrap(wrapper: Any, spec: WrapperSpec, gradient: WrapperSpec | None = None) -> Sequence[torch.Tensor]:
    """The plain tensors that stand for a wrapper. `gradient`: the spec of its gradient, that of the wrapper if None."""
    if not spec.requires_grad or torch.is_inference_mode_enabled():
        return _plain(wrapper, spec)
    with torch.enable_grad():
        carrying = _unwrap(wrapper, spec, gradient or spec)
    parts = parts_of(wrapper)
    if spec.is_apart:
        return [*(part.detach() for part in parts), *([carrying] if spec.is_whole else carrying)]
    carriers = iter(carrying)
    return [next(carriers) if carries else part for part, carries in zip(parts, spec.carries, strict=True)]


def unwrapping(spec: WrapperSpec, gradient: WrapperSpec | None) -> Callable[[Any], Sequence[torch.Tensor]]:
    """`unwrap` for rendered code."""
    return functools.partial(unwrap, spec=spec, gradient=gradient)


def wrap(spec: WrapperSpec, parts: Sequence[torch.Tensor], take: Take | None = None) -> Any:
    """The wrapper around these plain tensors, with their history. `take`: takes the wrapper's gradient apart."""
    if spec.keeps_parts:
        wrapper = rebuilt(spec, parts)
        return wrapper if wrapper.requires_grad is spec.requires_grad else wrapper.requires_grad_(spec.requires_grad)
    if not (torch.is_grad_enabled() and any(part.requires_grad for part in parts)):
        return rebuilt(spec, parts[: len(spec.carries)])
    return _wrap(spec, take or functools.partial(taken_gradient, spec), *parts)


def taken_by(take: Take, gradient: Any, layouts: Sequence[Layout], edges: Sequence[tuple[Any, int]]) -> Parts:
    """The cotangent of a result of a compiled function, for each plain tensor, in the `layouts`.

    A cotangent of a different kind is left with the function's node, at the end of the `edges`.
    """
    parts = take(gradient)
    if parts is not None and all(
        part is None or layout == own for part, layout, own in zip(parts, layouts_of(parts), layouts, strict=True)
    ):
        return parts
    if not hand_over(edges, gradient):
        raise unexpected(gradient)
    return [None] * len(layouts)


def layouts_of(parts: Parts) -> list[Layout]:
    """The shapes, dtypes and devices that autograd itself would convert gradients to."""
    return [None if part is None else (part.shape, part.dtype) for part in parts]


def taken_gradient(spec: WrapperSpec, gradient: Any) -> Parts | None:
    """The cotangent of a result of a compiled function, for each plain tensor; None if its class or metadata differ,
    and its class can't convert it.
    """
    if spec.is_whole:
        return None if is_wrapper(gradient) else [*[None] * len(spec.carries), gradient]
    like_result: Any = gradient
    if not _is_like(gradient, spec):
        like_result = converted(gradient, spec.metadata, spec.cls)
        cls = type(like_result)
        if cls is not spec.cls or like_result.shape != spec.layout(parts_of(like_result))[0]:
            return None
    parts = taken_apart(like_result)
    return [part if carries else None for part, carries in zip(parts, spec.carries, strict=True)]


def converted(gradient: Any, metadata: Any, cls: type) -> Any:
    """A gradient converted by its class to `cls` and `metadata`; None if the class does not convert it."""
    convert = getattr(gradient, "__coerce_same_metadata_as_tangent__", None)
    if convert is None:
        return None
    try:
        return convert(metadata) if type(gradient) is cls else convert(metadata, cls)
    except Exception:  # the class's own: a DTensor can't be placed as a sum of tensors
        return None


def taken_apart(gradient: Any) -> Sequence[torch.Tensor]:
    """The plain tensors of a gradient, differentiable if derivatives of the backward are needed."""
    if gradient.requires_grad and torch.is_grad_enabled():
        return unwrap(gradient, spec_of(gradient))
    return parts_of(gradient)


def _is_like(gradient: Any, spec: WrapperSpec) -> bool:
    return type(gradient) is spec.cls and spec.has_structure_of(gradient)


def unexpected(gradient: Any) -> UnsupportedTensorError:
    """The error for a gradient of a kind that the backward can't be compiled for."""
    cls = type(gradient)
    what = f"a {cls.__qualname__} with metadata {gradient.__tensor_flatten__()[1]}" if is_wrapper(gradient) else ""
    return UnsupportedTensorError(
        f"the gradient passed in for a result of a compiled function is {what or f'a {cls.__qualname__}'}, and its "
        "backward was compiled for a different class. Pass a gradient like the result, or run this part uncompiled."
    )


def _plain(wrapper: Any, spec: WrapperSpec) -> list[torch.Tensor]:
    parts = parts_of(wrapper)
    whole = [_without_elements(spec, parts)] if spec.is_whole else []
    return [*parts, *whole, *(carrier.make() for carrier in spec.carriers)]


def _without_elements(spec: WrapperSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the wrapper's shape in the memory of one element."""
    return torch.zeros((), dtype=spec.dtype, device=spec.device).expand(spec.layout(parts)[0])


# -------------------------------------------------------------------------------------------------- for captures


_plain_gradients: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def learn_gradient(cls: type, *, is_plain: bool) -> None:
    """Record that gradients of a class of wrappers are plain tensors, or wrappers."""
    _plain_gradients[cls] = is_plain


_carriers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def learn_carriers(spec: WrapperSpec, carriers: Sequence[Carrier]) -> None:
    """Record the plain tensors in the gradient of a wrapper that is an input of a capture."""
    wrapper = spec.of() if spec.of is not None else None
    if wrapper is not None:
        _carriers[wrapper] = tuple(carriers)


def predicted_spec(wrapper: Any) -> WrapperSpec:
    """The spec of a wrapper that is to be an input or output of graphs.

    Earlier captures tell whether its gradient is a plain tensor. Without any, it is taken to be one if an inner tensor
    has no gradients.
    """
    spec = spec_of(wrapper)
    if spec.requires_grad and _plain_gradients.get(spec.cls, not (all(spec.carries) or is_jagged(spec.cls))):
        return spec_of(wrapper, is_whole=True)
    carriers = _carriers.get(wrapper, ()) if spec.requires_grad else ()
    return dataclasses.replace(spec, carriers=carriers) if carriers else spec


class Samples:
    """For wrappers among the inputs of a call, plain tensors like `unwrap`'s, but without history."""

    def __init__(self) -> None:
        self._known: ById[Any, tuple[WrapperSpec, Sequence[torch.Tensor]]] = ById()

    def __call__(self, wrapper: Any) -> tuple[WrapperSpec, Sequence[torch.Tensor]]:
        """The spec of a wrapper, and its plain tensors: equal objects at each call."""
        sample = self._known.get(wrapper)
        if sample is None:
            spec = dataclasses.replace(predicted_spec(wrapper), of=weakref.ref(wrapper))
            with plain_execution():
                sample = self._known[wrapper] = spec, _samples(wrapper, spec)
        return sample


def _samples(wrapper: Any, spec: WrapperSpec) -> Sequence[torch.Tensor]:
    parts = _plain(wrapper, spec)
    if not spec.requires_grad or torch.is_inference_mode_enabled():
        return parts
    if spec.is_apart:
        own = len(spec.carries)
        return [*(part.detach() for part in parts[:own]), *(p.detach().requires_grad_() for p in parts[own:])]
    pairs = zip(parts, spec.carries, strict=True)
    return [part.detach().requires_grad_() if carries else part for part, carries in pairs]
