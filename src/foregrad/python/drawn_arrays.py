"""Arrays that a call draws: a stand-in becomes a tensor, and may be sliced and converted before, as tensors are.

NumPy's arithmetic is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from ..frontend.arrays import ArrayStandIn
from ..identity import class_property
from ._torch.asked import tell_type

_SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda tensor: tuple(tensor.shape),
    "size": torch.Tensor.numel,
    "nbytes": lambda tensor: tensor.numel() * tensor.element_size(),
}
_FACTS = {"ndim", "dtype", "itemsize"}
_CONVERTED_ALIKE = {"bool", "int64", "float32", "float64"}  # PyTorch converts to these as NumPy does, bit for bit
_REFUSED = (
    "lt le eq ne gt ge invert add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and "
    "rand or ror xor rxor neg pos abs matmul rmatmul bool int float complex index iter contains setitem delitem "
    "array_ufunc array_function array str repr format reduce_ex copy deepcopy iadd isub imul itruediv ifloordiv imod "
    "ipow iand ior ixor imatmul"
).split()


class DrawnArray(ArrayStandIn):
    """An array that this call drew or was given. `tensor()` gives the tensor for it, `refuse()` raises."""

    __slots__ = ("_refuse", "_value", "tensor")

    def __init__(self, value: Any, tensor: Callable[[], torch.Tensor], refuse: Callable[[], NoReturn]) -> None:
        self._value, self.tensor, self._refuse = value, tensor, refuse

    @class_property
    def __class__(self) -> type:
        return type(self._value)

    def _computed(self, value: Any, tensor: torch.Tensor) -> DrawnArray:
        return DrawnArray(value, lambda: tensor, self._refuse)

    def astype(self, dtype: Any) -> DrawnArray:
        converted = self._value.astype(dtype)
        if converted.dtype.name not in _CONVERTED_ALIKE:
            self._refuse()
        return self._computed(converted, self.tensor().to(dtype_of(converted), copy=True))

    def __getitem__(self, key: Any) -> DrawnArray:
        is_sliced = all(type(k) in (int, slice) or k is ... for k in (key if type(key) is tuple else (key,)))
        if not is_sliced:
            self._refuse()
        part = self._value[key]
        if not is_array(part):  # PyTorch takes the first element of an index, and leaves the error set if there is one
            return DrawnArray(part, self._refuse, self._refuse)
        return self._computed(part, self.tensor()[key])

    def __getattr__(self, name: str) -> Any:
        if name in _SIZES:
            return _SIZES[name](self.tensor())  # sizes that differ from call to call
        if name in _FACTS:
            return getattr(self._value, name)
        if hasattr(type(self._value), name):
            self._refuse()
        raise AttributeError(f"'{type(self._value).__name__}' object has no attribute '{name}'")

    def __len__(self) -> int:
        return len(self.tensor())

    __hash__ = None  # type: ignore[assignment]


def _refused(self: DrawnArray, *_: Any, **__: Any) -> NoReturn:
    self._refuse()


for _name in _REFUSED:
    setattr(DrawnArray, f"__{_name}__", _refused)

tell_type(DrawnArray, lambda array: type(array._value))


_from_numpy = torch.from_numpy


def from_numpy(array: Any) -> torch.Tensor:
    """`torch.from_numpy`, also of an array that was drawn."""
    return array.tensor() if type(array) is DrawnArray else _from_numpy(array)


def is_array(value: Any) -> bool:
    """Whether it is an array that a tensor can be made of."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biuf"


def dtype_of(array: Any) -> torch.dtype:
    """That of a tensor over an array."""
    return _from_numpy(array[None, ...][:0]).dtype


def overlaps(value: object, others: Iterable[object]) -> bool:
    """Whether a value is an array whose memory may overlap with arrays of its class among `others`."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return any(numpy.may_share_memory(value, other) for other in others)
