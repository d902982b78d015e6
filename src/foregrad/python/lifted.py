"""State that is a new number in each call, as a counter is: a function that takes the state as an argument.

`Lifted(function, places)` gets a tuple of the places' values ahead of the arguments, writes the values to the places,
and calls the function. So varying state is guarded, made symbolic and explained like any argument.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from .._torch.symbols import concrete, expression_in, expression_text, symbol_made
from ..frontend.call import StatefulFunction, forms_of
from ..graph.source import Names, compile_source
from ..interrupts import runs_user_code
from ..locks import bound
from ..runtime.lines import LineWriter
from .effects import StatePlace
from .holders import NUMPY_RANDOM, RANDOM
from .opaque import used_up


@dataclasses.dataclass(frozen=True, slots=True)
class Formula:
    """An argument of a draw that is computed from earlier draws."""

    text: str
    compute: Callable[[Sequence[Any]], Any] = dataclasses.field(compare=False)

    @classmethod
    def of_number(cls, number: Any, drawn: Sequence[Any]) -> Any:
        """The formula of a symbolic number in what was drawn; any other number as it is."""
        names = {symbol_made(value): f"d[{i}]" for i, value in enumerate(drawn) if isinstance(value, torch.SymInt)}
        free = expression_in(number, names).free_symbols if isinstance(number, torch.SymInt) else ()
        if not free or not free <= names.keys():
            return concrete(number)
        lines = LineWriter(Names(["d"]))
        text = expression_text(number, names, lines.bind)
        return cls(text, compile_source(f"def compute(d):\n    return {text}\n", "compute", lines.globals))


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """A call with a new result each time: a random number, or the time."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    path: str = dataclasses.field(compare=False)
    where: str = dataclasses.field(compare=False)  # the user's line
    dims: ClassVar[frozenset[int]] = frozenset()

    def given(self, drawn: Sequence[Any]) -> Draw:
        """The draw after `drawn`, with the values of its formulas."""
        args = (value.compute(drawn) if type(value) is Formula else value for value in self.args)
        return dataclasses.replace(self, args=tuple(args))

    def now(self, taken: Any) -> Any:
        return taken

    @property
    def is_drawn(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """A container's length (`index` is None), or an item, None for an index beyond the end. Calls add to the
    `container`: the object itself, or the place of the object.
    """

    container: Any
    index: int | None
    name: str
    window: int | None  # see `window_of`; a container with a different one does not answer
    dims: ClassVar[frozenset[int]] = frozenset()

    @property
    def path(self) -> str:
        return f"len({self.name})" if self.index is None else f"{self.name}[{self.index}]"

    def of(self, held: Any) -> Any:
        if window_of(held) != self.window:
            return None
        if self.index is None:
            return len(held)
        return held[self.index] if -len(held) <= self.index < len(held) else None

    def now(self, taken: Any) -> Any:
        try:
            return self.of(self.container.get() if isinstance(self.container, StatePlace) else self.container)
        except TypeError:  # there is no container any more
            return taken

    @property
    def is_drawn(self) -> bool:
        return False

    @property
    def identity(self) -> tuple[int, Any]:
        of = self.container
        target, key = (of.target, of.key) if isinstance(of, StatePlace) else (of, None)
        return id(target), (key, self.index, self.window, "answer")


def window_of(container: Any) -> int | None:
    """The most items of a deque, -1 if it has no limit; None for any other container."""
    if not isinstance(container, collections.deque):
        return None
    return -1 if container.maxlen is None else container.maxlen


Place = StatePlace | Draw | Answer


class Lifted(StatefulFunction):
    """`function` with its state at `places` as the first argument."""

    places: tuple[Place, ...]
    generators: Generators
    stand_ins: dict[tuple[int, Any], Any]
    """The values that the last call put into places, by the identity of the place."""
    drawn: list[tuple[Draw, Any]]
    """What was drawn for the last call: numbers, and stand-ins of arrays."""

    def __new__(cls, function: Callable[..., Any], places: tuple[Place, ...]) -> Lifted:
        lifted = super().__new__(cls, function)
        lifted.generators = Generators(place for place in places if isinstance(place, Draw))
        lifted.drawn = []
        lifted.places, lifted.found = places, ()
        lifted.arrays = frozenset(
            place.identity for place in places if isinstance(place, StatePlace) and place.is_array
        )
        lifted.uses_up = bool(lifted.generators.kinds)
        lifted.stand_ins = {}
        return lifted

    @runs_user_code
    def __call__(self, state: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing():
            self.generators.put_back()  # the function draws by itself
            return self.func(*args, **kwargs)
        self.drawn, self.found = [], ()
        for place, value in zip(self.places, state, strict=True):
            if isinstance(place, Draw):
                self.drawn.append((place, value))
                continue
            self.stand_ins[place.identity] = value
            if isinstance(place, StatePlace):
                place.put(value)
        return self.func(*args, **kwargs)

    def draws(self, draw: Draw, number: int) -> bool:
        """Whether a draw of the run is the form's with this number."""
        if number == len(self.drawn):
            return False
        expected, drawn = self.drawn[number][0], [value for _, value in self.drawn[:number]]
        args = tuple(Formula.of_number(value, drawn) for value in draw.args)
        found, numbers = dataclasses.replace(draw, args=args, path=expected.path), [*map(concrete, drawn)]
        is_fixed = all(type(value) is not Formula for value in args)
        if is_fixed or found == expected or found.given(numbers) != expected.given(numbers):
            return expected.given(drawn) == draw
        places = self.found or self.places
        self.found = (*places[:number], found, *places[number + 1 :])
        return True


class Generators:
    """The random generators behind some draws, and the states they had before the draws of this thread's call."""

    def __init__(self, draws: Iterable[Draw]) -> None:
        found = {id(spent): spent for draw in draws if (spent := used_up(draw.function)) is not None}
        self.kinds = [(RANDOM if isinstance(g, random.Random) else NUMPY_RANDOM, g) for g in found.values()]
        self._before = threading.local()

    def remember(self) -> None:
        self._before.states = [kind.read(generator) for kind, generator in self.kinds]

    def put_back(self) -> None:
        for (kind, generator), state in zip(self.kinds, getattr(self._before, "states", ()), strict=False):
            kind.put_back(generator, state, None)


def lifted_forms(function: Any) -> list[Lifted]:
    return [form for form in forms_of(function) if isinstance(form, Lifted)]


_running = threading.local()


def capturing() -> contextlib.AbstractContextManager[None]:
    """Context: the thread captures a function and gets the draws handed in."""
    return bound(_running, "capture", True)


def is_capturing() -> bool:
    return getattr(_running, "capture", False)


def lifted_places(function: Any) -> list[StatePlace]:
    """All places that are arguments of a function."""
    return [place for form in lifted_forms(function) for place in form.places if isinstance(place, StatePlace)]


def containers_asked(function: Any) -> set[tuple[int, Any]]:
    """The places of containers whose answers are arguments of a function."""
    asked = [place.container for form in lifted_forms(function) for place in form.places if isinstance(place, Answer)]
    return {place.identity for place in asked if isinstance(place, StatePlace)}


def lifted_paths(function: Any) -> tuple[str, ...]:
    """The expressions by which people know the places that are arguments of a function."""
    return tuple(place.path for form in lifted_forms(function) for place in form.places if not place.is_drawn)


def stand_in_at(function: Any, identity: tuple[int, Any], otherwise: Any = None) -> Any:
    """The value that the last call of a function put at a place, or `otherwise`."""
    forms = lifted_forms(function)
    return next((form.stand_ins[identity] for form in forms if identity in form.stand_ins), otherwise)


def times_lifted(function: Any) -> int:
    """The number of a function's arguments that are its states."""
    return sum(1 for _ in forms_of(function))
