"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

The first capture makes the calls and notes them; then the function is captured with what is drawn as arguments
(`Lifted`), and each draw gives that which was made before the graph runs. Calls that draw otherwise than was noted
(`DrawsDiffer`) are captured without such arguments, and run eagerly where they draw at all.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend.call import FlatCall
from ...frontend.expected import is_plain
from ...frontend.lifted import Converted, Draw, DrawnValue, GivenArray, Step, drawing_form, drawn_in, is_of_given
from ...frontend.opaque import CLOCKS
from ...identity import ById, IdSet
from .drawn_arrays import DrawnArray, dtype_of, is_array


class DrawsFound(UnsupportedSideEffectError):  # noqa: N818 - asks for another capture, with these as arguments
    """The function draws numbers, or computes with arrays: they are to be its arguments."""

    def __init__(self, name: str, draws: tuple[Draw, ...], converted: tuple[Converted, ...]) -> None:
        super().__init__(
            f"`{name}` takes other numbers from {draws[0].path} in each call, which a graph would not. Take from it "
            "before the call and pass what it gives (for random numbers, torch's own functions work)."
            if draws
            else _COMPUTES.format(name)
        )
        self.name, self.draws, self.converted = name, draws, converted

    def refusal(self) -> UnsupportedSideEffectError:
        """The error for a call of which these can't be arguments, as others are."""
        if not self.draws:
            return UnsupportedSideEffectError(str(self))
        return UnsupportedSideEffectError(
            f"`{self.name}` takes from {self.draws[0].path} in another way in each call; take from it before the call."
        )


_COMPUTES = (
    "`{}` computes with an array that it is given, in NumPy and in another way than before. Make a tensor of the array "
    "(`torch.from_numpy`) and compute with that."
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
                if place.is_of(value):
                    return self._given(tensor, array)
            form.missing = (Converted(value, kind),)
            raise DrawsDiffer(f"`{self.name}` makes a tensor of another array in the call than before.")
        if not any(place.is_of(value) for place in self.converted):
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
