"""Fake tensors. Checked on torch 2.13.0."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "fake_device",
    "fake_grouped_mm",
    "new_fake",
    "new_fake_over",
    "symbolic_fake",
]

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def new_fake(
    mode: FakeTensorMode,
    shape: Any,
    stride: Any,
    dtype: torch.dtype,
    device: torch.device,
    offset: int = 0,
) -> FakeTensor:
    """A fake tensor of that layout; ten times faster than `FakeTensorMode.from_tensor`."""
    # The modes of an enclosing capture must not see how its fakes are made.
    with torch._C._DisableTorchDispatch():
        if offset:
            span = 1 + offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            meta = torch.empty(span, dtype=dtype, device="meta").as_strided(shape, stride, offset)
        else:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def new_fake_over(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    shape: Any,
    stride: Any,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
) -> FakeTensor:
    """A fake tensor over a fake storage (made by `meta_storage`): how arguments that share memory are made."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(storage, offset, shape, stride)
    return FakeTensor(mode, meta, device)


def fake_grouped_mm(mode: FakeTensorMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`aten._grouped_mm` on fakes: what torch has for them takes bfloat16 alone, the CPU's kernel other floats too."""
    func = torch.ops.aten._grouped_mm.default
    dtype = args[0].dtype
    if dtype is torch.bfloat16 or args[1].dtype is not dtype:
        return mode.dispatch(func, (), args, kwargs)
    lowered = [new_fake(mode, t.shape, t.stride(), torch.bfloat16, fake_device(t)) for t in args[:2]]
    out: Any = mode.dispatch(func, (), (*lowered, *args[2:]), kwargs)
    wanted = kwargs.get("out_dtype") or dtype
    return new_fake(mode, out.shape, out.stride(), wanted, fake_device(args[0]))


def symbolic_fake(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator whose kernel reads sizes as plain numbers, on fakes of symbolic sizes: by its reference in Python.

    `NotImplemented` for every other operator.
    """
    if func is not torch.ops.aten.constant_pad_nd.default:
        return NotImplemented
    from torch import _refs

    with mode:
        return _refs.constant_pad_nd(*args, **kwargs)


def meta_storage(nbytes: int) -> torch.UntypedStorage:
    """A storage of that many bytes with no memory behind it."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def fake_device(tensor: torch.Tensor) -> torch.device:
    """The device a tensor says it is on, without the dispatch that `.device` costs on a fake."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
