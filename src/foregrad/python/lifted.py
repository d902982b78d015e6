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
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from ..frontend.call import StatefulFunction, forms_of
from ..interrupts import runs_user_code
from ..locks import bound
from .effects import StatePlace
from .holders import NUMPY_RANDOM, RANDOM
from .opaque import used_up


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """A call with a new result each time: a random number, or the time."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    path: str = dataclasses.field(compare=False)
    dims: ClassVar[frozenset[int]] = frozenset()

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
        lifted.places = places
        lifted.arrays = frozenset(
            place.identity for place in places if isinstance(place, StatePlace) and place.is_array
        )
        lifted.uses_up = bool(lifted.generators.kinds)
        lifted.stand_ins = {}
        return lifted

    @runs_user_code
    def __call__(self, state: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            self.drawn = []
        for place, value in zip(self.places, state, strict=True) if is_capturing() else ():
            if isinstance(place, Draw):
                self.drawn.append((place, value))
                continue
            self.stand_ins[place.identity] = value
            if isinstance(place, StatePlace):
                place.put(value)
        if self.generators.kinds and not is_capturing():
            self.generators.put_back()  # the function draws by itself
        return self.func(*args, **kwargs)


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


def numbered(draws: Iterable[Draw]) -> tuple[Draw, ...]:
    """Draws with paths that tell them apart."""
    return tuple(dataclasses.replace(draw, path=f"{draw.path}() number {i}") for i, draw in enumerate(draws))


def drawn_in(function: Any) -> list[tuple[Draw, Any]]:
    """The draws of the running call."""
    return next((form.drawn for form in _lifted_forms(function) if form.drawn), [])


def _lifted_forms(function: Any) -> list[Lifted]:
    return [form for form in forms_of(function) if isinstance(form, Lifted)]


_running = threading.local()


def capturing() -> contextlib.AbstractContextManager[None]:
    """Context: the thread captures a function and gets the draws handed in."""
    return bound(_running, "capture", True)


def is_capturing() -> bool:
    return getattr(_running, "capture", False)


def lifted_places(function: Any) -> list[StatePlace]:
    """All places that are arguments of a function."""
    return [place for form in _lifted_forms(function) for place in form.places if isinstance(place, StatePlace)]


def containers_asked(function: Any) -> set[tuple[int, Any]]:
    """The places of containers whose answers are arguments of a function."""
    asked = [place.container for form in _lifted_forms(function) for place in form.places if isinstance(place, Answer)]
    return {place.identity for place in asked if isinstance(place, StatePlace)}


def lifted_paths(function: Any) -> tuple[str, ...]:
    """The expressions by which people know the places that are arguments of a function."""
    return tuple(place.path for form in _lifted_forms(function) for place in form.places if not place.is_drawn)


def stand_in_at(function: Any, identity: tuple[int, Any], otherwise: Any = None) -> Any:
    """The value that the last call of a function put at a place, or `otherwise`."""
    forms = _lifted_forms(function)
    return next((form.stand_ins[identity] for form in forms if identity in form.stand_ins), otherwise)


def times_lifted(function: Any) -> int:
    """The number of a function's arguments that are its states."""
    return sum(1 for _ in forms_of(function))
