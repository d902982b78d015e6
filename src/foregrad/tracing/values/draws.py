"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

The first capture makes the calls and notes them; then the function is captured with what is drawn as arguments
(`Lifted`), and each draw gives that which was made before the graph runs. Calls that draw otherwise than was noted
(`DrawsDiffer`) are captured without such arguments, and run eagerly where they draw at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend.clocks import CLOCKS
from ...frontend.expected import is_plain
from ...frontend.lifted import Converted, Draw, DrawnValue, Step, drawing_form, drawn_in
from .drawn_arrays import DrawnArray, dtype_of, is_array

__all__ = ["Draws", "DrawsDiffer", "DrawsFound"]


class DrawsFound(UnsupportedSideEffectError):  # noqa: N818 - asks for another capture, with these as arguments
    """The function draws numbers: they are to be its arguments."""

    def __init__(self, name: str, draws: tuple[Draw, ...], converted: tuple[Converted, ...]) -> None:
        super().__init__(
            f"`{name}` takes other numbers from {draws[0].path} in each call, which a graph would not. Take from it "
            "before the call and pass what it gives (for random numbers, torch's own functions work)."
        )
        self.name, self.draws, self.converted = name, draws, converted

    def refusal(self) -> UnsupportedSideEffectError:
        """The error for a call of which these can't be arguments, as others are."""
        return UnsupportedSideEffectError(
            f"`{self.name}` takes from {self.draws[0].path} in another way in each call; take from it before the call."
        )


class DrawsDiffer(UnsupportedSideEffectError):  # noqa: N818 - the call is captured in another way
    """A call of a function draws other numbers than those that are its arguments."""


class Draws:
    """The draws of one run. `planned`: those that are arguments, with the values of this call."""

    def __init__(self, name: str, function: Any, known: Callable[[Any], bool]) -> None:
        self.name = name
        self.function = function
        self.known = known  # whether an object is older than the call
        self.made: list[Draw] = []  # that no argument stands for
        self.given: list[tuple[torch.Tensor, int]] = []  # tensors over arrays, and their versions then
        self.converted: list[Converted] = []  # of these, arrays that became tensors
        self.seeded: dict[int, Any] = {}  # generators that the function makes itself, by id
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

    def _refuse_written(self) -> NoReturn:
        raise UnsupportedSideEffectError(
            f"`{self.name}` writes to a tensor over an array that it draws, and looks at the array after that. Write "
            "to a copy (`torch.tensor(array)`)."
        )

    def _tensor(self, value: DrawnValue | Step, array: Any) -> Any:
        """The tensor that stands for an array: an argument, once the draws are."""
        form = drawing_form(self.function)
        written = any(tensor._version != version for tensor, version in self.given)
        if form is not None:
            for place, tensor in form.converted:
                if place.is_of(value):
                    if written and not any(tensor is known for known, _ in self.given):
                        self._refuse_written()
                    self.given.append((tensor, tensor._version))
                    return tensor
            form.missing = (Converted(value, "drawn"),)
            raise DrawsDiffer(f"`{self.name}` makes a tensor of another array, drawn in the call, than before.")
        if not any(place.is_of(value) for place in self.converted):
            self.converted.append(Converted(value, "drawn"))
        # Of this run nothing is kept.
        if written:
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
        if self.made:
            raise DrawsFound(self.name, tuple(self.made), tuple(self.converted))

    def seed(self, generator: Any, seed: Any) -> None:
        """The function seeds a generator. `known(generator)`: it is older than the call."""
        if not is_plain(seed) or seed is None:
            raise UnsupportedSideEffectError(
                f"`{self.name}` makes a random generator and seeds it with no fixed number: its numbers would be the "
                "same in each compiled call. Make it before the call."
            )
        if generator is not None and not self.known(generator):
            self.seeded[id(generator)] = generator

    def _refuse(self, draw: Draw) -> None:
        raise UnsupportedSideEffectError(self._said(draw))

    def _said(self, draw: Draw) -> str:
        return (
            f"`{self.name}` takes from {draw.path} something other than a number with fixed arguments, or more or less "
            "often from call to call. Take from it before the call and pass what it gives (for random numbers, torch's "
            "own functions work)."
        )
