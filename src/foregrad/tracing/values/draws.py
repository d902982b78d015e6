"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

During a capture the functions of `random`, `numpy.random` and `time`, and the methods of `random.Random`, are wrapped,
on the capturing thread and for callers that are the user's code. The first capture makes the calls and notes them; then
the function is captured with the drawn numbers as arguments (`Lifted`), and each draw gives that which was made before
the graph runs. Calls that draw otherwise than was noted (`DrawsDiffer`) are captured without such arguments, and
run eagerly where they draw at all.

What the user's code has under names of its own (`from time import time`, `datetime`) is replaced there for the run, see
`stand_in_for`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from ..._torch.plain_types import tell_type
from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend.clocks import CLOCKS, DATES, DRAWN, NAMES_OF
from ...frontend.expected import is_plain
from ...frontend.libraries import is_outside
from ...frontend.lifted import Converted, Draw, DrawnValue, Step, drawing_form, drawn_in
from ...frontend.opaque import is_generator_of_numpy
from ...locks import InPlace
from .drawn_arrays import DrawnArray

__all__ = ["Draws", "DrawsDiffer", "DrawsFound", "drawing", "not_drawing", "stand_in_for"]

_OF_NUMPY = (
    "permutation choice dirichlet multivariate_normal standard_gamma chisquare geometric "
    "rand randn randint random random_sample uniform normal standard_normal beta gamma exponential poisson binomial "
    "laplace lognormal triangular"
).split()
_active = threading.local()


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
        is_array = _is_array(value)
        if type(value) not in (int, float) and not is_array:
            self._refuse(draw)
        draw = dataclasses.replace(draw, is_array=is_array)
        self.made.append(draw)
        self.taken += 1
        return self._array(value, draw) if is_array else value

    def _array(self, value: Any, draw: Draw) -> DrawnArray:
        def refuse() -> NoReturn:
            raise UnsupportedSideEffectError(
                f"`{self.name}` needs to know the numbers that it takes from {draw.path.partition('(')[0]} (a loop, "
                "`float()`, an assignment to elements, a function that is not plain arithmetic of NumPy's). Make a "
                "tensor of the array, or take it before the call and pass it."
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
        return torch.tensor(array.tolist(), dtype=_original_from_numpy(array[None, ...][:0]).dtype)

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


@contextlib.contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Context: the user's code on this thread draws through `draws`."""
    before = getattr(_active, "draws", None)
    _active.draws = draws
    try:
        with _patches:
            yield
    finally:
        _active.draws = before


@contextlib.contextmanager
def not_drawing() -> Iterator[None]:
    """Context: what this thread draws is nobody's concern."""
    before = getattr(_active, "draws", None)
    _active.draws = None
    try:
        yield
    finally:
        _active.draws = before


def _is_users() -> bool:
    """Whether a function is called by the user's code, be it through Python's own `random`."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "random":
        frame = frame.f_back
    return frame is not None and not is_outside(frame.f_globals.get("__name__"))


def wrapper_of(original: Callable[..., Any], path: str) -> Callable[..., Any]:
    """A drawing function that a capture sees."""

    @functools.wraps(original, assigned=("__doc__", "__name__"), updated=())
    def draw(*args: Any, **kwargs: Any) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is None or not _is_users():
            return original(*args, **kwargs)
        _active.draws = None  # what it is made of is no draw of its own
        try:
            return draws.draw(Draw(original, args, tuple(kwargs.items()), path), original, args, kwargs)
        finally:
            _active.draws = draws

    return draw


def _method(name: str, kind: type = random.Random) -> Callable[..., Any]:
    """A method of `random.Random` that a capture sees."""
    original = getattr(kind, name)

    @functools.wraps(original, assigned=("__doc__", "__name__"), updated=())
    def method(self: random.Random, *args: Any, **kwargs: Any) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is None or not _is_users() or id(self) in draws.seeded:
            return original(self, *args, **kwargs)
        _active.draws = None
        try:
            of = _SYSTEM if isinstance(self, random.SystemRandom) else self  # which are all alike
            bound = original.__get__(of)
            return draws.draw(Draw(bound, args, tuple(kwargs.items()), f"random.{name}"), bound, args, kwargs)
        finally:
            _active.draws = draws

    return method


_SYSTEM = random.SystemRandom()
_originals_of_seed = random.Random.seed
_original_from_numpy = torch.from_numpy


def _from_numpy(array: Any) -> torch.Tensor:
    if type(array) is not DrawnArray:
        return _original_from_numpy(array)
    return array.tensor() if array.is_array() else _original_from_numpy(array.number())  # which raises


def _is_array(value: Any) -> bool:
    """Whether it is an array that a tensor can be made of."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biuf"


def _seed(self: random.Random, a: Any = None, version: int = 2) -> None:
    """A generator is made, or seeded, by the user's code: one that it makes gives the same numbers in each call."""
    draws = getattr(_active, "draws", None)
    if draws is not None and _is_users() and not isinstance(self, random.SystemRandom):
        draws.seed(self, a)
    _originals_of_seed(self, a, version)


def _default_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, assigned=("__doc__", "__name__"), updated=())
    def default_rng(seed: Any = None) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is not None and _is_users():
            draws.seed(None, seed)
        return original(seed)

    return default_rng


def _randbits(original: Callable[..., Any]) -> Callable[..., Any]:
    def randbits(k: int) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is not None and _is_users():
            draws.seed(None, None)
        return original(k)

    return randbits


def stand_in_for(value: Any) -> Any:
    """What a run finds in the place of a function that draws, or of `datetime`."""
    if is_generator_of_numpy(value):
        return _Generator(value)
    if not any(value is date for date in DATES):
        return wrapper_of(value, DRAWN.get(id(value)) or value.__qualname__)
    if value is not dt:
        return _dates(value)
    module = types.ModuleType("datetime", dt.__doc__)
    vars(module).update(vars(dt), datetime=_dates(dt.datetime), date=_dates(dt.date))
    return module


class _Generator:
    """Stands for a generator of NumPy's, whose methods no other can be put in the place of."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._of)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        return wrapper_of(value, f"{type(self._of).__name__}.{name}") if callable(value) else value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._of.__reduce_ex__(protocol)


tell_type(_Generator, lambda generator: type(generator._of))


class _OfDates(type):
    """The class of classes that stand for `date` and `datetime`, whose objects are theirs."""

    of: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.of(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.of)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.of)


def _dates(kind: Any) -> Any:
    asked = {name: wrapper_of(getattr(kind, name), f"{kind.__name__}.{name}") for name in _NOW if hasattr(kind, name)}
    return _OfDates(kind.__name__, (kind,), {name: staticmethod(drawn) for name, drawn in asked.items()} | {"of": kind})


_NOW = ("now", "today", "utcnow")
_originals: list[tuple[Any, str, Any]] = []
_ABSENT = object()


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _install() -> None:
    for module, names in NAMES_OF.items():
        for name in names:
            if hasattr(module, name):
                _replace(module, name, wrapper_of(getattr(module, name), f"{module.__name__}.{name}"))
    for name in NAMES_OF[random]:
        _replace(random.Random, name, _method(name))
    for name in ("random", "getrandbits"):
        _replace(random.SystemRandom, name, _method(name, random.SystemRandom))
    _replace(random.Random, "seed", _seed)
    numpy = sys.modules.get("numpy.random")
    entropy: Any = getattr(numpy, "bit_generator", None)
    if hasattr(entropy, "randbits"):  # what a generator is seeded with that is given no seed
        _replace(entropy, "randbits", _randbits(entropy.randbits))
    for name in _OF_NUMPY if numpy is not None else ():
        _replace(numpy, name, wrapper_of(getattr(numpy, name), f"numpy.random.{name}"))
    _replace(torch, "from_numpy", _from_numpy)
    if numpy is not None:
        _replace(numpy, "default_rng", _default_rng(numpy.default_rng))


def _remove() -> None:
    while _originals:
        owner, name, value = _originals.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


_patches = InPlace(_install, _remove)
