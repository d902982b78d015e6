"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

The first capture makes the calls and notes them; then the function is captured with the draws as arguments (`Lifted`),
and each draw gives the number drawn before the graph runs. For a call that draws otherwise than noted
(`ArgumentsDiffer`), the draws are noted again: they are the arguments of a second form, with graphs of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from .._torch.symbols import concrete, map_symbolic
from ..errors import UnsupportedSideEffectError
from ..frontend.call import FlatCall, LeadingPlace
from ..frontend.values import is_plain
from ..identity import ById, IdSet
from ..tracing.tape.again import ArgumentsDiffer, ArgumentsFound
from ..tracing.values.numbers import TracedFloat
from .drawn_arrays import DrawnArray, dtype_of, is_array
from .lifted import Draw, lifted_forms
from .opaque import CLOCKS, REFUSED_DRAWS


class DrawsFound(ArgumentsFound):
    """The function draws: each draw that it `made`, with the value."""

    def __init__(self, name: str, made: list[tuple[Draw, Any]]) -> None:
        draws = (dataclasses.replace(draw, path=f"{draw.path}() number {i}") for i, (draw, _) in enumerate(made))
        super().__init__(name, made[0][0].path, tuple(draws))
        self.made = made

    def fits(self, places: tuple[LeadingPlace, ...]) -> bool:
        return len(places) == self._num_equal(places) == len(self.made)

    def _num_equal(self, places: tuple[LeadingPlace, ...]) -> int:
        """The number of first draws that are a form's too."""
        values = [value for _, value in self.made]
        pairs = enumerate(zip(places, self.taken, strict=False))
        shorter = min(len(places), len(values))
        return next((i for i, (a, b) in pairs if type(a) is not Draw or a.given(values) != b), shorter)

    def reason(self, places: tuple[LeadingPlace, ...]) -> str:
        draw, _ = self.made[min(self._num_equal(places), len(self.made) - 1)]
        return f"`{self.name}` takes from {draw.path} at {draw.where} differently in each call; draw before the call."


class Draws:
    """The draws of one run. `form`: the form with draws as arguments."""

    def __init__(self, name: str, call: FlatCall, known: Callable[[Any], bool]) -> None:
        self.name, self.call = name, call
        self.known = known  # whether an object is older than the call
        self.made: list[tuple[Draw, Any]] = []  # that no argument stands for, with the value
        self.seeded: IdSet[Any] = IdSet()  # generators that the function makes itself
        self.form = next((form for form in lifted_forms(call.function) if form.places[0].is_drawn), None)
        self.taken = 0

    def draw(self, draw: Draw, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if draw.function in REFUSED_DRAWS:
            raise UnsupportedSideEffectError(
                f"`{self.name}` calls `{draw.path}`: its result differs in each call. Call it before, and pass the "
                "result (the clocks `time.time` and `time.perf_counter` may be read inside)."
            )
        if any(type(value) is TracedFloat for value in (*args, *kwargs.values())):
            self._refuse(draw)
        if self.form is not None:
            if not self.form.draws(draw, self.taken):
                raise ArgumentsDiffer(f"`{self.name}` draws differently in each call.")
            self.taken += 1
            return self.form.drawn[self.taken - 1][1]
        args, kwargs = map_symbolic((args, kwargs), concrete)
        if not all(map(is_plain, (*args, *kwargs.values()))):
            self._refuse(draw)
        value = original(*args, **kwargs)
        if type(value) not in (int, float) and not is_array(value):
            self._refuse(draw)
        self.made.append((dataclasses.replace(draw, args=args, kwargs=tuple(kwargs.items())), value))
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
        form = self.form
        if form is not None and (form.found or self.taken != len(form.drawn)):
            raise ArgumentsDiffer(f"`{self.name}` draws differently in each call.")
        clocks = [draw.path for draw, _ in self.made if draw.function in CLOCKS]
        if len(clocks) > 1:
            raise UnsupportedSideEffectError(
                f"`{self.name}` takes the time more than once ({', '.join(dict.fromkeys(clocks))}): a compiled call "
                "would take all times before its graph, and nothing would lie between them. Take times round the call."
            )
        if self.made:
            raise DrawsFound(self.name, self.made)

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

    def _refuse(self, draw: Draw) -> NoReturn:
        raise UnsupportedSideEffectError(
            f"`{self.name}` takes from {draw.path} with arguments, or a result, that are no fixed numbers. Draw before "
            "the call and pass the result (for random numbers, torch's own functions work)."
        )
