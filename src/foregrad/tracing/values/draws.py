"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

The first capture makes the calls and notes them; then the function is captured with what is drawn as arguments
(`Lifted`), and each draw gives that which was made before the graph runs. Calls that draw otherwise than was noted
(`DrawsDiffer`) are captured without such arguments, and run eagerly where they draw at all.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..._torch.asked import tell_type
from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend.call import FlatCall
from ...frontend.expected import is_plain
from ...frontend.lifted import (
    ConstantArray,
    Converted,
    Draw,
    DrawnValue,
    GivenArray,
    Items,
    Step,
    drawing_form,
    drawn_in,
    is_of_given,
    is_same,
)
from ...frontend.opaque import CLOCKS
from ...identity import ById, IdSet


class DrawsFound(UnsupportedSideEffectError):  # noqa: N818 - asks for another capture, with these as arguments
    """The function draws numbers, or computes with arrays: they are to be its arguments."""

    def __init__(self, name: str, draws: tuple[Draw, ...], converted: tuple[Converted, ...]) -> None:
        super().__init__(
            f"`{name}` takes other numbers from {draws[0].path} in each call, which a graph would not. Take from it "
            "before the call and pass what it gives (for random numbers, torch's own functions work)."
            if draws
            else f"`{name}` computes with an array that it is given, in NumPy and in another way than before. Make a "
            "tensor of the array (`torch.from_numpy`) and compute with that."
        )
        self.name, self.draws, self.converted = name, draws, converted

    def refusal(self) -> UnsupportedSideEffectError:
        """The error for a call of which these can't be arguments, as others are."""
        if not self.draws:
            return UnsupportedSideEffectError(str(self))
        return UnsupportedSideEffectError(
            f"`{self.name}` takes from {self.draws[0].path} in another way in each call; take from it before the call."
        )


class DrawsDiffer(UnsupportedSideEffectError):  # noqa: N818 - the call is captured in another way
    """A call of a function draws other numbers than those that are its arguments."""


class ArrayNeeded(DrawsDiffer):
    """An array of the state that is an argument can't be one: the numbers in it are needed."""


class Draws:
    """The draws of one run. `planned`: those that are arguments, with the values of this call."""

    def __init__(self, name: str, call: FlatCall, known: Callable[[Any], bool]) -> None:
        self.name, self.call, self.function = name, call, call.function
        self.known = known  # whether an object is older than the call
        self.made: list[Draw] = []  # that no argument stands for
        self.given: list[tuple[torch.Tensor, int, Any]] = []  # tensors over arrays, their versions then, the arrays
        self.arguments: ById[Any, torch.Tensor] = ById()  # over arrays among the arguments, by these
        self.converted: list[Converted] = []  # of these, arrays that became tensors
        self.seeded: IdSet[Any] = IdSet()  # generators that the function makes itself
        self.taken = 0

    def draw(self, draw: Draw, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planned = drawn_in(self.function)
        if self.taken < len(planned):
            expected, value = planned[self.taken]
            if expected != draw:
                raise DrawsDiffer(self._said(draw))
            self.taken += 1
            return self._array(value, expected) if expected.is_array else value
        if planned:
            raise DrawsDiffer(self._said(draw))
        if any(is_symbolic(value) or not is_plain(value) for value in (*args, *kwargs.values())):
            self._refuse(draw)
        value = original(*args, **kwargs)
        becomes_array = is_array(value)
        if type(value) not in (int, float) and not becomes_array:
            self._refuse(draw)
        draw = dataclasses.replace(draw, is_array=becomes_array)
        self.made.append(draw)
        self.taken += 1
        return self._array(value, draw) if becomes_array else value

    def _array(self, value: Any, draw: Draw) -> DrawnArray:
        def refuse() -> NoReturn:
            raise UnsupportedSideEffectError(
                f"`{self.name}` needs to know the numbers that it takes from {draw.path.partition('(')[0]} (a loop, "
                "`float()`, an assignment to elements, a function that is not plain arithmetic of NumPy's, "
                "`torch.Tensor(array)`). Make a tensor of the array by `torch.tensor` or `torch.from_numpy`, or take "
                "it before the call and pass it."
            )

        return DrawnArray(value, DrawnValue(self.taken - 1), self._tensor, refuse)

    def arrays_of(self, leaves: Sequence[Any]) -> Callable[[torch.Tensor], DrawnArray]:
        """What gives the stand-in of an array among the arguments, of the one among `leaves` for a tensor over it."""
        over = ById((leaves[i], (given, self.call.paths[i])) for i, given in self.call.arrays().items())
        return lambda tensor: self._given_array(tensor, *over[tensor])

    def _given_array(self, tensor: torch.Tensor, given: GivenArray, path: str) -> DrawnArray:

        def refuse() -> NoReturn:
            raise UnsupportedSideEffectError(
                f"`{self.name}` needs to know the numbers in the array `{path}` (a loop, `float()`, an assignment to "
                "elements, a function that is not plain arithmetic of NumPy's). Make a tensor of the array."
            )

        def convert(value: Any, array: Any) -> Any:
            return refuse() if given.way is None and isinstance(value, Step) else self._tensor(value, array)

        self.arguments[given.array] = tensor
        return DrawnArray(given.array, dataclasses.replace(given, array=None), convert, refuse)

    def _refuse_written(self) -> NoReturn:
        raise UnsupportedSideEffectError(
            f"`{self.name}` writes to a tensor over an array, and looks at the array after that, or at another one in "
            "its memory. Write to a copy (`torch.tensor(array)`)."
        )

    def _written(self) -> list[tuple[torch.Tensor, Any]]:
        """The tensors over arrays that were written to, and the arrays."""
        return [(tensor, array) for tensor, version, array in self.given if tensor._version != version]

    def _check_written(self) -> None:
        """Raise where a tensor was written to and another one is over memory of the same array."""
        for written, array in self._written():
            share: Any = sys.modules["numpy"].may_share_memory
            if any(tensor is not written and share(array, other) for tensor, _, other in self.given):
                self._refuse_written()

    def _given(self, tensor: torch.Tensor, array: Any) -> torch.Tensor:
        if self._written() and not any(tensor is known for known, _, _ in self.given):
            self._refuse_written()
        self.given.append((tensor, tensor._version, array))
        return tensor

    def _tensor(self, value: DrawnValue | GivenArray | Step, array: Any) -> Any:
        """The tensor that stands for an array: an argument, once the draws are."""
        if isinstance(value, GivenArray):
            tensor = self.arguments[array]
            self.given.append((tensor, tensor._version, array))  # another one in its memory: see `_check_written`
            return tensor
        form, kind = drawing_form(self.function), "of an argument" if is_of_given(value) else "drawn"
        if form is not None:
            for place, tensor in form.converted:
                if is_same(place.value, value):
                    return self._given(tensor, array)
            form.missing = (Converted(value, kind),)
            raise DrawsDiffer(f"`{self.name}` makes a tensor of another array in the call than before.")
        if not any(is_same(place.value, value) for place in self.converted):
            self.converted.append(Converted(value, kind))
        # Of this run nothing is kept.
        if self._written():
            self._refuse_written()
        return torch.tensor(array.tolist(), dtype=dtype_of(array))

    def check(self) -> None:
        """The run is over: it made all draws that it was expected to make. Raises `DrawsFound` where it made others."""
        planned = drawn_in(self.function)
        if planned and self.taken != len(planned):
            raise DrawsDiffer(self._said(planned[self.taken][0]))
        clocks = [draw.path for draw in self.made if draw.function in CLOCKS]
        if len(clocks) > 1:
            raise UnsupportedSideEffectError(
                f"`{self.name}` takes the time more than once ({', '.join(dict.fromkeys(clocks))}): a compiled call "
                "would take all times before its graph, and nothing would lie between them. Take times round the call."
            )
        self._check_written()
        if self.made or self.converted:
            raise DrawsFound(self.name, tuple(self.made), tuple(self.converted))

    def seed(self, generator: Any, seed: Any) -> None:
        """The function seeds a generator, or sets its state. `known(generator)`: it is older than the call."""
        if not is_plain(seed) or seed is None:
            raise UnsupportedSideEffectError(
                f"`{self.name}` makes a random generator and seeds it with no fixed number: its numbers would be the "
                "same in each compiled call. Make it before the call."
            )
        if generator is not None and self.known(generator):
            raise UnsupportedSideEffectError(
                f"`{self.name}` seeds a random generator that was there before, or sets its state: a compiled call "
                "draws before its graph. Seed before the call, or use a generator of the call's own."
            )
        if generator is not None:
            self.seeded.add(generator)

    def _refuse(self, draw: Draw) -> None:
        raise UnsupportedSideEffectError(self._said(draw))

    def _said(self, draw: Draw) -> str:
        return (
            f"`{self.name}` takes from {draw.path} something other than a number with fixed arguments, or more or less "
            "often from call to call. Take from it before the call and pass what it gives (for random numbers, torch's "
            "own functions work)."
        )


# -------------------------------------------------------------------- drawn arrays
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
