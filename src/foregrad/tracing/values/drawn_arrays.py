"""NumPy's arrays that a function draws or is given: each call computes with them and makes tensors of them.

A capture finds a `DrawnArray` in the place of such an array. What is done with it in NumPy is done, and noted: as steps
of an expression, which each call evaluates before its graph. Where an array becomes a tensor, or an index of one, that
tensor is an argument of the graph. Whatever needs to know the numbers themselves (`float()`, `tolist()`, a loop, an
assignment to elements) is refused.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..._torch.asked import tell_type
from ...frontend.expected import is_plain
from ...frontend.lifted import ConstantArray, DrawnValue, GivenArray, Items, Step, is_of_given

# Functions and methods that give a new array, or a view, whose shape follows from shapes.
_METHODS = set(
    "all any argmax argmin argsort astype clip copy cumprod cumsum flatten max mean min prod ravel reshape round "
    "squeeze std sum swapaxes take transpose var".split()
)
_FUNCTIONS = _METHODS - {"astype"} | set(
    "broadcast_to concatenate expand_dims flip fliplr flipud full_like hstack moveaxis ones_like roll sort stack "
    "vstack where zeros_like".split()
)
_SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda tensor: tuple(tensor.shape),
    "size": torch.Tensor.numel,
    "nbytes": lambda tensor: tensor.numel() * tensor.element_size(),
}
_FACTS = {"shape", "ndim", "size", "dtype", "itemsize", "nbytes"}
_OPERATORS = (
    "lt le eq ne gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or "
    "ror xor rxor neg pos abs invert matmul rmatmul"
).split()
_REFUSED = (
    "bool int float complex index iter contains setitem delitem array str repr format reduce_ex copy deepcopy iadd "
    "isub imul itruediv ifloordiv imod ipow iand ior ixor imatmul"
).split()


class DrawnArray:
    """An array that this call drew or was given, or computed of one. `convert(expression, value)` makes the tensor,
    `refuse()` raises.
    """

    __slots__ = ("_convert", "_expression", "_refuse", "_value")

    def __init__(
        self,
        value: Any,
        expression: DrawnValue | GivenArray | Step,
        convert: Callable[[Any, Any], Any],
        refuse: Callable[[], NoReturn],
    ) -> None:
        self._value, self._expression, self._convert, self._refuse = value, expression, convert, refuse

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    def tensor(self) -> Any:
        """The array as a tensor over its memory."""
        if not self.is_array():
            return self.step(sys.modules["numpy"].asarray, (self,), {}).tensor()
        return self._convert(self._expression, self._value)

    def is_array(self) -> bool:
        """Whether it is an array, and no number of NumPy's."""
        return type(self._value).__name__ == "ndarray"

    def number(self) -> Any:
        return self._value

    def step(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function` of arrays, or the method of that name: done, and noted."""
        if "out" in kwargs or any(map(_is_unknown, (*args, *kwargs.values()))):
            self._refuse()
        named = tuple(sorted(kwargs.items()))
        if isinstance(function, str):
            done = getattr(_inside(args[0]), function)(*_inside(args[1:]), **_inside(kwargs))
        else:
            done = function(*_inside(args), **_inside(kwargs))
        if type(done).__module__ != "numpy" or not hasattr(done, "dtype"):
            self._refuse()
        return DrawnArray(done, Step(function, _noted(args), _noted(named)), self._convert, self._refuse)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs.keys() - {"dtype"}:
            self._refuse()
        return self.step(ufunc, inputs, kwargs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        is_choice = function.__name__ == "where" and len(args) != 3  # how many there are follows from the numbers
        if function.__name__ not in _FUNCTIONS or is_choice:
            self._refuse()
        return self.step(function, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        parts = key if type(key) is tuple else (key,)
        if any(isinstance(part, DrawnArray) and part._value.dtype.kind == "b" for part in parts):
            self._refuse()
        return self.step("__getitem__", (self, key), {})

    def __getattr__(self, name: str) -> Any:
        if name in _SIZES and self.is_array() and is_of_given(self._expression):
            return _SIZES[name](self.tensor())  # others in other calls
        if name in _FACTS:
            return getattr(self._value, name)
        if name == "T":
            return self.step("transpose", (self,), {})
        if name in _METHODS:
            return lambda *args, **kwargs: self.step(name, (self, *args), kwargs)
        if hasattr(type(self._value), name):
            self._refuse()
        raise AttributeError(f"'{type(self._value).__name__}' object has no attribute '{name}'")

    def __len__(self) -> int:
        if not hasattr(self._value, "__len__"):  # a number of an array that `torch.Tensor(array)` reads in C++
            self._refuse()
        return len(self.tensor()) if is_of_given(self._expression) else len(self._value)

    __hash__ = None  # type: ignore[assignment]


def _operator(name: str) -> Callable[..., Any]:
    def method(self: DrawnArray, *others: Any) -> Any:
        if any(_is_unknown(other) for other in others):
            return NotImplemented
        return self.step(f"__{name}__", (self, *others), {})

    return method


def _refused(self: DrawnArray, *_: Any, **__: Any) -> NoReturn:
    self._refuse()


for _name in _OPERATORS:
    setattr(DrawnArray, f"__{_name}__", _operator(_name))
for _name in _REFUSED:
    setattr(DrawnArray, f"__{_name}__", _refused)

tell_type(DrawnArray, lambda array: type(array._value))


def _inside(value: Any) -> Any:
    """Arguments with the arrays themselves."""
    if type(value) is DrawnArray:
        return value._value
    if type(value) in (tuple, list):
        return type(value)(map(_inside, value))
    return {key: _inside(item) for key, item in value.items()} if type(value) is dict else value


def _noted(value: Any) -> Any:
    """Arguments as a step keeps them."""
    if type(value) is DrawnArray:
        return value._expression
    if type(value) is list:
        return Items(map(_noted, value))
    if is_array(value):
        return ConstantArray(value)
    return tuple(map(_noted, value)) if type(value) is tuple else value


def _is_unknown(value: Any) -> bool:
    """Whether it may be something else in another call."""
    if type(value) in (tuple, list):
        return any(map(_is_unknown, value))
    if type(value) is slice:
        return any(map(_is_unknown, (value.start, value.stop, value.step)))
    is_type = isinstance(value, (type, types.EllipsisType)) or type(value).__module__.startswith("numpy.dtypes")
    return not (type(value) is DrawnArray or is_plain(value) or is_type or is_array(value))


# -------------------------------------------------------------------- tensors

_from_numpy = torch.from_numpy


def from_numpy(array: Any) -> torch.Tensor:
    """`torch.from_numpy`, also of an array that was drawn."""
    if type(array) is not DrawnArray:
        return _from_numpy(array)
    return array.tensor() if array.is_array() else _from_numpy(array.number())  # which raises


def is_array(value: Any) -> bool:
    """Whether it is an array that a tensor can be made of."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biuf"


def dtype_of(array: Any) -> torch.dtype:
    """That of a tensor over an array."""
    return _from_numpy(array[None, ...][:0]).dtype
