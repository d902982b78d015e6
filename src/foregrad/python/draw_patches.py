"""Functions that draw, wrapped during a capture: from `random`, `numpy.random`, `time` and the like.

They are wrapped on the capturing thread, for callers that are the user's code, from the moment when code begins that
names one. Names of the user's own (`from time import time`) are replaced there for the run, see `stand_in_for`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..errors import UnsupportedSideEffectError
from ..identity import class_property
from ..locks import Bind, ProcessPatch, Replacements, bound
from ..tracing.values.numbers import TRACED, numbers_of
from ._torch.asked import tell_type
from .drawn_arrays import from_numpy
from .draws import Draws
from .libraries import is_outside
from .lifted import Draw
from .opaque import NAMES_OF, is_generator_of_numpy

_OF_NUMPY = (
    "permutation choice dirichlet multivariate_normal standard_gamma chisquare geometric "
    "rand randn randint random random_sample uniform normal standard_normal beta gamma exponential poisson binomial "
    "laplace lognormal triangular"
).split()
_active = threading.local()


@contextlib.contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Context: the user's code on this thread draws through `draws`."""
    with bound(_active, "draws", draws), contextlib.ExitStack() as stack:
        stack.enter_context(_FROM_ARRAYS.patch)
        with bound(_active, "stack", stack), bound(_active, "groups", [*_GROUPS]):
            yield


def not_drawing() -> contextlib.AbstractContextManager[None]:
    """Context: the thread's draws go unnoted."""
    return bound(_active, "draws", None)


def _users(path: str = "random") -> tuple[str, ...]:
    """The function that the user's code calls: `path`, or one of Python's `random` in between, and the line; or ()."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "random":
        path, frame = f"random.{frame.f_code.co_name}", frame.f_back
    if frame is None or is_outside(frame.f_globals.get("__name__")):
        return ()
    return path, f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def wrapper_of(original: Callable[..., Any], path: str) -> Callable[..., Any]:
    """A drawing function that a capture sees."""

    @functools.wraps(original, assigned=("__doc__", "__name__"), updated=())
    def draw(*args: Any, **kwargs: Any) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is None or not (called := _users(path)):
            return original(*args, **kwargs)
        with not_drawing():  # the generator's own making is no draw of the program's
            return draws.draw(Draw(original, args, tuple(kwargs.items()), *called), original, args, kwargs)

    return draw


def _method(name: str) -> Callable[..., Any]:
    """A method of `random.Random` that a capture sees."""
    original = getattr(random.Random, name)

    @functools.wraps(original, assigned=("__doc__", "__name__"), updated=())
    def method(self: random.Random, *args: Any, **kwargs: Any) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is None or not (called := _users(f"random.{name}")) or self in draws.seeded:
            return original(self, *args, **kwargs)
        with not_drawing():
            draw = original.__get__(self)
            return draws.draw(Draw(draw, args, tuple(kwargs.items()), *called), draw, args, kwargs)

    return method


_originals_of_seed = random.Random.seed


def _seed(self: random.Random, a: Any = None, version: int = 2) -> None:
    """A generator is made, or seeded, by the user's code: a generator made there gives equal numbers in each call."""
    draws = getattr(_active, "draws", None)
    if draws is not None and _users() and not isinstance(self, random.SystemRandom):
        draws.seed(self, a)
    _originals_of_seed(self, a, version)


_original_setstate = random.Random.setstate


def _setstate(self: random.Random, state: Any) -> None:
    draws = getattr(_active, "draws", None)
    if draws is not None and _users():
        draws.seed(self, 0)
    _original_setstate(self, state)


def stand_in_for(value: Any) -> Any:
    """A run's substitute for a function that draws, or for a generator of NumPy's."""
    if is_generator_of_numpy(value):
        return _NumpyGenerator(value)
    return wrapper_of(value, value.__qualname__)


class _NumpyGenerator:
    """Stands for a generator of NumPy's: its methods can't be replaced."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    @class_property
    def __class__(self) -> type:
        return type(self._of)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        return wrapper_of(value, f"{type(self._of).__name__}.{name}") if callable(value) else value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._of.__reduce_ex__(protocol)


tell_type(_NumpyGenerator, lambda generator: type(generator._of))


class _Group:
    """Names in modules and classes that are wrapped together, where code begins that names a member."""

    def __init__(self, named: Iterable[str], install: Callable[[Bind], None]) -> None:
        replaced = Replacements()
        self.named = frozenset(named)
        self.patch = ProcessPatch(lambda: install(replaced.bind), replaced.restore)
        install(lambda owner, name, _: Replacements.names.add((id(owner), name)))  # none is taken for a setting


def _wrap_random(bind: Bind) -> None:
    _wrap_names(random, bind)
    for name in NAMES_OF[random]:
        bind(random.Random, name, _method(name))
    of_module: Any = vars(random)["_inst"]
    methods: dict[str, Callable[..., None]] = {"seed": _seed, "setstate": _setstate}
    for name, method in methods.items():
        bind(random.Random, name, method)
        bind(random, name, functools.partial(method, of_module))


def _wrap_numpy(bind: Bind) -> None:
    numpy = sys.modules.get("numpy.random")
    for name in _OF_NUMPY if numpy is not None else ():
        bind(numpy, name, wrapper_of(getattr(numpy, name), f"numpy.random.{name}"))
    if numpy is not None:
        bind(numpy, "shuffle", _shuffling(numpy.shuffle))


def _shuffling(original: Callable[..., Any]) -> Callable[..., Any]:
    """A write to an array by a draw is no draw of numbers."""

    def shuffle(x: Any) -> Any:
        draws = getattr(_active, "draws", None)
        if draws is not None and _users():
            raise UnsupportedSideEffectError(
                f"`{draws.name}` shuffles in place by NumPy's generator. Take `a[np.random.permutation(len(a))]`, or "
                "shuffle before the call."
            )
        return original(x)

    return shuffle


def _wrap_names(module: Any, bind: Bind) -> None:
    for name in NAMES_OF[module]:
        if hasattr(module, name):
            bind(module, name, wrapper_of(getattr(module, name), f"{module.__name__}.{name}"))


_OF_LISTS = {
    "numpy": "mean average median std var sum prod max min amax amin ptp nanmean percentile quantile",
    "statistics": "mean median stdev pstdev variance pvariance",
}


def _wrap_of_lists(bind: Bind) -> None:
    for module in filter(None, map(sys.modules.get, _OF_LISTS)):
        for name in _OF_LISTS[module.__name__].split():
            bind(module, name, _of_list(getattr(module, name)))


@functools.cache
def _of_list(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a list of numbers. Where the graph computes some, it is one operation on numbers."""

    def of_items(others: Any, options: Any, *items: Any) -> Any:
        return original([*items], *others, **dict(options))

    @functools.wraps(original, assigned=("__doc__", "__name__"), updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        is_known = {*map(type, (*args[1:], *kwargs.values()))} <= {int, float, str, types.NoneType}
        items = args[0] if args and is_known and isinstance(args[0], _LISTS) else ()
        number = next((item for item in items if type(item) in TRACED), None)
        numbers = None if number is None else numbers_of(number)
        if numbers is None or not all(isinstance(item, (int, float)) for item in items):
            return original(*args, **kwargs)
        return numbers.apply(of_items, args[1:], tuple(kwargs.items()), *items)

    return function


_LISTS = (list, tuple, collections.deque)
_RANDOM = _Group((*random.__all__, "_randbelow"), _wrap_random)
_GROUPS = [_RANDOM, _Group((*_OF_NUMPY, "shuffle"), _wrap_numpy)]
_GROUPS += [_Group(" ".join(_OF_LISTS.values()).split(), _wrap_of_lists)]
_GROUPS += [_Group(NAMES_OF[of], functools.partial(_wrap_names, of)) for of in (time, os)]
_FROM_ARRAYS = _Group((), lambda bind: bind(torch, "from_numpy", from_numpy))


def code_begins(code: types.CodeType, namespace: dict[str, Any]) -> None:
    """Wrap the functions that draw, as far as the code names them: the user's, or that of Python's `random`."""
    groups: list[_Group] = getattr(_active, "groups", [])
    for group in tuple(groups):
        if not group.named.isdisjoint(code.co_names) or (group is _RANDOM and namespace is vars(random)):
            _active.stack.enter_context(group.patch)
            groups.remove(group)
