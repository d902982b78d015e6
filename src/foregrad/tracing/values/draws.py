"""Numbers drawn from Python's and NumPy's generators and from clocks while a function runs: calls that are made again.

During a capture the functions of `random`, `numpy.random` and `time`, and the methods of `random.Random`, are wrapped,
on the capturing thread and for callers that are the user's code. The first capture makes the calls and notes them; then
the function is captured with the drawn numbers as arguments (`Lifted`), and each draw gives that which was made before
the graph runs. Calls that draw otherwise than was noted (`DrawsDiffer`) are captured without such arguments, and
run eagerly where they draw at all.

Known weakness: `datetime.now()` is a constant; methods of NumPy's `Generator` objects can't be wrapped: such calls run
eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend.expected import is_plain
from ...frontend.libraries import is_outside
from ...frontend.lifted import Draw, drawn_in
from ...locks import InPlace

__all__ = ["Draws", "DrawsDiffer", "DrawsFound", "drawing", "is_wrapper", "wrapper_of"]

_OF_RANDOM = (
    "random uniform randint randrange getrandbits gauss normalvariate lognormvariate expovariate vonmisesvariate "
    "gammavariate betavariate paretovariate weibullvariate triangular _randbelow"
).split()
_OF_NUMPY = (
    "rand randn randint random random_sample uniform normal standard_normal beta gamma exponential poisson binomial "
    "laplace lognormal triangular"
).split()
_OF_TIME = "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns".split()
_OTHERS = {  # what they give is no number
    uuid: "uuid1 uuid4".split(),
    secrets: "token_bytes token_hex token_urlsafe randbelow randbits choice".split(),
    os: ["urandom"],
}
_active = threading.local()


class DrawsFound(UnsupportedSideEffectError):  # noqa: N818 - asks for another capture, with these as arguments
    """The function draws numbers: they are to be its arguments."""

    def __init__(self, name: str, draws: tuple[Draw, ...]) -> None:
        super().__init__(
            f"`{name}` takes other numbers from {draws[0].path} in each call, which a graph would not. Take from it "
            "before the call and pass what it gives (for random numbers, torch's own functions work)."
        )
        self.draws = draws


class DrawsDiffer(UnsupportedSideEffectError):  # noqa: N818 - the call is captured in another way
    """A call of a function draws other numbers than those that are its arguments."""


class Draws:
    """The draws of one run. `planned`: those that are arguments, with the values of this call."""

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.function = function
        self.made: list[Draw] = []  # that no argument stands for
        self.taken = 0

    def draw(self, draw: Draw, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        if type(value) not in (int, float):
            self._refuse(draw)
        self.made.append(draw)
        return value

    def check(self) -> None:
        """The run is over: it made all draws that it was expected to make. Raises `DrawsFound` where it made others."""
        planned = drawn_in(self.function)
        if self.taken != len(planned):
            raise DrawsDiffer(self._said(planned[self.taken][0]))
        if self.made:
            raise DrawsFound(self.name, tuple(self.made))

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


def is_wrapper(value: Any) -> bool:
    """Whether a function is one of these wrappers."""
    return getattr(value, "__code__", None) is _WRAPPER


_WRAPPER: Any = wrapper_of(time.time, "").__code__


def _method(name: str) -> Callable[..., Any]:
    """A method of `random.Random` that a capture sees."""
    original = getattr(random.Random, name)

    @functools.wraps(original, assigned=("__doc__", "__name__"), updated=())
    def method(self: random.Random, *args: Any, **kwargs: Any) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is None or isinstance(self, random.SystemRandom) or not _is_users():
            return original(self, *args, **kwargs)
        _active.draws = None
        try:
            bound = original.__get__(self)
            return draws.draw(Draw(bound, args, tuple(kwargs.items()), f"random.{name}"), bound, args, kwargs)
        finally:
            _active.draws = draws

    return method


_originals: list[tuple[Any, str, Any]] = []
_ABSENT = object()


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _install() -> None:
    for name in _OF_RANDOM:
        if hasattr(random, name):
            _replace(random, name, wrapper_of(getattr(random, name), f"random.{name}"))
    for name in _OF_RANDOM:
        _replace(random.Random, name, _method(name))
    for name in _OF_TIME:
        _replace(time, name, wrapper_of(getattr(time, name), f"time.{name}"))
    for module, names in _OTHERS.items():
        for name in names:
            _replace(module, name, wrapper_of(getattr(module, name), f"{module.__name__}.{name}"))
    numpy = sys.modules.get("numpy.random")
    for name in _OF_NUMPY if numpy is not None else ():
        _replace(numpy, name, wrapper_of(getattr(numpy, name), f"numpy.random.{name}"))


def _remove() -> None:
    while _originals:
        owner, name, value = _originals.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


_patches = InPlace(_install, _remove)
