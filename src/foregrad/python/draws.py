"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

The first capture makes the calls and notes them; then the function is captured with the draws as arguments (`Lifted`),
and each draw gives the number drawn before the graph runs. Calls that draw otherwise than noted (`ArgumentsDiffer`) are
captured without draws as arguments, and run eagerly where they draw at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from .._torch.symbols import is_symbolic
from ..errors import UnsupportedSideEffectError
from ..frontend.call import FlatCall
from ..frontend.values import is_plain
from ..identity import ById, IdSet
from ..tracing.tape.again import ArgumentsDiffer, ArgumentsFound
from .drawn_arrays import DrawnArray, dtype_of, is_array
from .lifted import Draw, drawn_in, numbered
from .opaque import CLOCKS, REFUSED_DRAWS


class Draws:
    """The draws of one run. `planned`: the draws that are arguments, with the call's values."""

    def __init__(self, name: str, call: FlatCall, known: Callable[[Any], bool]) -> None:
        self.name, self.call, self.function = name, call, call.function
        self.known = known  # whether an object is older than the call
        self.made: list[Draw] = []  # that no argument stands for
        self.seeded: IdSet[Any] = IdSet()  # generators that the function makes itself
        self.taken = 0

    def draw(self, draw: Draw, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if draw.function in REFUSED_DRAWS:
            raise UnsupportedSideEffectError(
                f"`{self.name}` calls `{draw.path}`: its result differs in each call. Call it before, and pass the "
                "result (the clocks `time.time` and `time.perf_counter` may be read inside)."
            )
        planned = drawn_in(self.function)
        if self.taken < len(planned):
            expected, value = planned[self.taken]
            if expected != draw:
                raise ArgumentsDiffer(self._said(draw))
            self.taken += 1
            return value
        if planned:
            raise ArgumentsDiffer(self._said(draw))
        if any(is_symbolic(value) or not is_plain(value) for value in (*args, *kwargs.values())):
            self._refuse(draw)
        value = original(*args, **kwargs)
        if type(value) not in (int, float) and not is_array(value):
            self._refuse(draw)
        self.made.append(draw)
        self.taken += 1
        if not is_array(value):
            return value
        # Nothing of this run is kept.
        of_it = torch.tensor(value.tolist(), dtype=dtype_of(value))
        return DrawnArray(value, lambda: of_it, functools.partial(self._refuse_numbers, draw.path))

    def arrays_of(self, leaves: Sequence[Any]) -> Callable[[torch.Tensor], DrawnArray]:
        """A function that gives an array argument's stand-in: the array of the tensor over it among `leaves`."""
        over = ById((leaves[i], (array, self.call.paths[i])) for i, array in self.call.arrays().items())

        def stand_in(tensor: torch.Tensor) -> DrawnArray:
            array, path = over[tensor]
            return DrawnArray(array, lambda: tensor, functools.partial(self._refuse_numbers, path))

        return stand_in

    def _refuse_numbers(self, path: str) -> NoReturn:
        raise UnsupportedSideEffectError(
            f"`{self.name}` computes in NumPy with the array `{path}`, or needs its numbers (a loop, `float()`, an "
            "assignment to elements, `torch.Tensor(array)`). Make a tensor of the array (`torch.from_numpy`) and "
            "compute with the tensor."
        )

    def check(self) -> None:
        """The run is over: it made all draws that were expected. Raises `ArgumentsFound` for any further draw."""
        planned = drawn_in(self.function)
        if planned and self.taken != len(planned):
            raise ArgumentsDiffer(self._said(planned[self.taken][0]))
        clocks = [draw.path for draw in self.made if draw.function in CLOCKS]
        if len(clocks) > 1:
            raise UnsupportedSideEffectError(
                f"`{self.name}` takes the time more than once ({', '.join(dict.fromkeys(clocks))}): a compiled call "
                "would take all times before its graph, and nothing would lie between them. Take times round the call."
            )
        if self.made:
            raise ArgumentsFound(self.name, self.made[0].path, numbered(self.made))

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
            f"`{self.name}` takes from {draw.path}, but not always numbers with fixed arguments, or not equally "
            "often in each call. Draw before the call and pass the result (for random numbers, torch's own functions "
            "work)."
        )
