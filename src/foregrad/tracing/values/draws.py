"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

The first capture makes the calls and notes them; then the function is captured with what is drawn as arguments
(`Lifted`), and each draw gives that which was made before the graph runs. Calls that draw otherwise than was noted
(`DrawsDiffer`) are captured without such arguments, and run eagerly where they draw at all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..._torch.asked import tell_type
from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend.call import FlatCall
from ...frontend.expected import is_plain
from ...frontend.lifted import Draw, drawn_in
from ...frontend.opaque import CLOCKS, REFUSED_DRAWS
from ...identity import ById, IdSet


class DrawsFound(UnsupportedSideEffectError):  # noqa: N818 - asks for another capture, with these as arguments
    """The function draws numbers, or arrays: they are to be its arguments."""

    def __init__(self, name: str, draws: tuple[Draw, ...]) -> None:
        super().__init__(
            f"`{name}` draws from {draws[0].path}; a graph would replay one value. Draw before the call, and pass the "
            "result (for random numbers, torch's own functions work)."
        )
        self.name, self.draws = name, draws

    def refusal(self) -> UnsupportedSideEffectError:
        """The error for a call of which these can't be arguments, as others are."""
        return UnsupportedSideEffectError(
            f"`{self.name}` takes from {self.draws[0].path} in another way in each call; take from it before the call."
        )


class DrawsDiffer(UnsupportedSideEffectError):  # noqa: N818 - the call is captured in another way
    """A call draws other numbers than those that are its arguments, or needs the numbers in an array that is one."""


class Draws:
    """The draws of one run. `planned`: those that are arguments, with the values of this call."""

    def __init__(self, name: str, call: FlatCall, known: Callable[[Any], bool]) -> None:
        self.name, self.call, self.function = name, call, call.function
        self.known = known  # whether an object is older than the call
        self.made: list[Draw] = []  # that no argument stands for
        self.seeded: IdSet[Any] = IdSet()  # generators that the function makes itself
        self.taken = 0

    def draw(self, draw: Draw, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if draw.function in REFUSED_DRAWS:
            raise UnsupportedSideEffectError(
                f"`{self.name}` calls `{draw.path}`, which gives something else in each call. Call it before, and pass "
                "what it gives (of clocks, `time.time` and `time.perf_counter` can be asked inside)."
            )
        planned = drawn_in(self.function)
        if self.taken < len(planned):
            expected, value = planned[self.taken]
            if expected != draw:
                raise DrawsDiffer(self._said(draw))
            self.taken += 1
            return value
        if planned:
            raise DrawsDiffer(self._said(draw))
        if any(is_symbolic(value) or not is_plain(value) for value in (*args, *kwargs.values())):
            self._refuse(draw)
        value = original(*args, **kwargs)
        if type(value) not in (int, float) and not is_array(value):
            self._refuse(draw)
        self.made.append(draw)
        self.taken += 1
        if not is_array(value):
            return value
        # Of this run nothing is kept.
        of_it = torch.tensor(value.tolist(), dtype=dtype_of(value))
        return DrawnArray(value, lambda: of_it, functools.partial(self._refuse_numbers, draw.path))

    def arrays_of(self, leaves: Sequence[Any]) -> Callable[[torch.Tensor], DrawnArray]:
        """What gives the stand-in of an array among the arguments, of the one among `leaves` for a tensor over it."""
        over = ById((leaves[i], (array, self.call.paths[i])) for i, array in self.call.arrays().items())

        def stand_in(tensor: torch.Tensor) -> DrawnArray:
            array, path = over[tensor]
            return DrawnArray(array, lambda: tensor, functools.partial(self._refuse_numbers, path))

        return stand_in

    def _refuse_numbers(self, path: str) -> NoReturn:
        raise UnsupportedSideEffectError(
            f"`{self.name}` computes in NumPy with the array `{path}`, or needs its numbers (a loop, `float()`, an "
            "assignment to elements, `torch.Tensor(array)`). Make a tensor of the array (`torch.from_numpy`) and "
            "compute with that."
        )

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
        if self.made:
            raise DrawsFound(self.name, tuple(self.made))

    def seed(self, generator: Any, seed: Any) -> None:
        """The function seeds a generator, or sets its state. `known(generator)`: it is older than the call."""
        if not is_plain(seed) or seed is None:
            raise UnsupportedSideEffectError(
                f"`{self.name}` makes a random generator and seeds it with no fixed number: its numbers would be the "
                "same in each compiled call. Make it before the call."
            )
        if self.known(generator):
            raise UnsupportedSideEffectError(
                f"`{self.name}` seeds a random generator that was there before, or sets its state: a compiled call "
                "draws before its graph. Seed before the call, or use a generator of the call's own."
            )
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
# What stands for an array: it becomes a tensor, and may be sliced and converted before, as tensors are. Arithmetic of
# NumPy's is refused.

_SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda tensor: tuple(tensor.shape),
    "size": torch.Tensor.numel,
    "nbytes": lambda tensor: tensor.numel() * tensor.element_size(),
}
_FACTS = {"ndim", "dtype", "itemsize"}
_CONVERTED_ALIKE = {"bool", "int64", "float32", "float64"}  # to these PyTorch converts as NumPy does, bit for bit
_REFUSED = (
    "lt le eq ne gt ge invert add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and "
    "rand or ror xor rxor neg pos abs matmul rmatmul bool int float complex index iter contains setitem delitem "
    "array_ufunc array_function array str repr format reduce_ex copy deepcopy iadd isub imul itruediv ifloordiv imod "
    "ipow iand ior ixor imatmul"
).split()


class DrawnArray:
    """An array that this call drew or was given. `tensor()` gives the tensor for it, `refuse()` raises."""

    __slots__ = ("_refuse", "_value", "tensor")

    def __init__(self, value: Any, tensor: Callable[[], torch.Tensor], refuse: Callable[[], NoReturn]) -> None:
        self._value, self.tensor, self._refuse = value, tensor, refuse

    @property  # type: ignore[misc]
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
            return _SIZES[name](self.tensor())  # others in other calls
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
