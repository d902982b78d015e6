"""Objects whose insides are not attributes: memory of numbers, context variables, random generators, caches.

An answer is compared like any value that a function read. A random generator, unless PyTorch's, is compared before and
after a capture: a graph would not repeat a draw.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import gc
import io
import mmap
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from .libraries import HASHES, OF_CTYPES, referent

_LRU = type(functools.lru_cache(lambda: None))
_LINK = "_lru_list_elem"
_OF_BYTES = (bytearray, array.array, mmap.mmap, *OF_CTYPES)


def asked_of(value: Any) -> Callable[[Any], Any] | None:
    """A function that reads an object's present contents, as a plain value or one object; None where there is none."""
    if isinstance(value, _OF_BYTES):
        return bytes
    if isinstance(value, memoryview):
        return memoryview.tobytes
    if isinstance(value, contextvars.ContextVar):
        return context_value
    if is_cached_function(value):
        return _NotCleared(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.hasobject:
            return _objects
        if type(value) not in (numpy.ndarray, numpy.memmap):
            # Further arrays, masked ones for example, name their contents themselves.
            return lambda values: (values.dtype.str, values.shape, values.tobytes())
        return functools.partial(_numbers, numpy, numpy.array(value, order="K"))
    if isinstance(value, weakref.ref):
        return referent
    if isinstance(value, contextvars.Context):
        return lambda context: hash(tuple((id(variable), id(value)) for variable, value in context.items()))
    if type(value).__module__ in HASHES and value.digest_size:
        digest: Callable[[Any], Any] = type(value).digest
        return digest
    if isinstance(value, ctypes._Pointer):
        return lambda pointer: bytes(pointer.contents) if pointer else None
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return _written
    return None


def context_value(variable: Any) -> Any:
    """A context variable's value, or its default; None where it has neither."""
    try:
        return variable.get()
    except LookupError:
        return None


class _NotCleared:
    """Whether the cache of a function still holds its results. An empty cache is judged by the next results asked
    about.

    A cache of limited size has a new link for each result, so one link tells.
    """

    def __init__(self, cached: Any) -> None:
        self._table = results_of(cached)[0]
        self._entries = self._newest()

    def __call__(self, cached: Any) -> bool:
        if not self._entries:
            self._entries = self._newest()
        return all(self._table.get(key, self) is result for key, result in self._entries)

    def _newest(self) -> list[tuple[Any, Any]]:
        entries = list(self._table.items())
        is_linked = bool(entries) and type(entries[0][1]).__name__ == _LINK
        return entries[-1:] if is_linked else entries


def is_cached_function(value: Any) -> bool:
    """Whether a value is a function under `functools.cache` or `lru_cache`."""
    return issubclass(type(value), _LRU)  # objects made on first use would warn when asked


def size_of_cache(cached: Any, _: Any) -> int:
    return int(cached.cache_info().currsize)


def names_in_own(value: threading.local, _: Any) -> frozenset[str]:
    return frozenset(vars(value))


def of_each(attribute: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """An attribute of each of the values."""
    return tuple(map(operator.attrgetter(attribute), values))


def derived_from(cls: Any) -> int:
    return hash(tuple(map(id, type.__subclasses__(cls))))


def results_of(cached: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The dict behind a function's cache in C: results by their keys.

    An unlimited cache is a dict of results. A limited cache is a dict of links and holds the links' keys and results
    itself, the oldest first, also of links taken out of the dict: of a key's links, the last is in use.
    """
    held = gc.get_referents(cached)
    attributes = getattr(cached, "__dict__", None)
    table: dict[Any, Any] = next((item for item in held if type(item) is dict and item is not attributes), {})
    kind: Any = type(next(iter(table.values()), None))
    if kind.__name__ != _LINK:
        return table, dict(table)
    at = [index for index, item in enumerate(held) if item is kind and index > 1]
    return table, {held[index - 2]: held[index - 1] for index in at if isinstance(held[index - 2], Hashable)}


def _objects(values: Any) -> Any:
    """The objects in an array: plain values by value, further objects by identity."""
    plain = (int, float, str, bool, bytes, complex, type(None))
    return (values.shape, tuple(item if type(item) in plain else id(item) for item in values.ravel().tolist()))


def _numbers(numpy: Any, before: Any, values: Any) -> str:
    """Whether an array is unchanged bit for bit: nothing is copied, and the first difference ends the comparison."""
    if values.dtype != before.dtype or values.shape != before.shape:
        return f"{values.dtype}{list(values.shape)}"
    order = "F" if before.flags.f_contiguous and values.flags.f_contiguous else "C"
    rows = [array.reshape(-1, order=order) for array in (before, values)]  # an array in one piece is not copied
    same = True
    if values.nbytes:
        whole = all(row.nbytes % 8 == 0 and row.ctypes.data % 8 == 0 for row in rows)
        a, b = (row.view(numpy.uint64 if whole else numpy.uint8) for row in rows)
        starts = range(0, len(a), _AT_ONCE)
        same = all(numpy.array_equal(a[at : at + _AT_ONCE], b[at : at + _AT_ONCE]) for at in starts)
    kept = "" if values.flags.writeable else ", read-only,"
    return f"{values.dtype}{list(values.shape)}{kept} {'as captured' if same else 'of other numbers'}"


_AT_ONCE = 1 << 17  # a megabyte: both pieces stay in the processor's cache


def _written(file: Any) -> Any:
    return (None, 0) if file.closed else (file.getvalue(), file.tell())


# -------------------------------------------------------------------- what is used up


def used_up(value: Any) -> Any:
    """The object that a value's use uses up: the value itself, or the method's generator; None: nothing."""
    if type(value) in _STAYS:
        return None
    if isinstance(value, types.ModuleType):
        return _generator_of_module(value)
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        value = value.__self__
    if isinstance(value, types.ModuleType):
        return None
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value
    return value if is_generator_of_numpy(value) else None


_STAYS = {types.FunctionType, type, tuple, list, dict, set, frozenset, str, bytes, int, float, bool, type(None)}


def _generator_of_module(module: types.ModuleType) -> Any:
    if module is random:
        return random._inst
    if module.__name__ == "numpy.random":
        return module.mtrand._rand
    return None


def is_generator_of_numpy(value: Any) -> bool:
    """Whether a value is a random generator of NumPy."""
    numbers = sys.modules.get("numpy.random")
    return numbers is not None and isinstance(value, (numbers.Generator, numbers.RandomState))


def is_random_generator(value: Any) -> bool:
    return isinstance(value, random.Random) or is_generator_of_numpy(value)


# -------------------------------------------------------------------- what gives something else each time
# Functions that give something else each time they are called, by name: random numbers and times.


NAMES_OF: dict[Any, list[str]] = {
    random: (
        "random uniform randint randrange getrandbits gauss normalvariate lognormvariate expovariate vonmisesvariate "
        "gammavariate betavariate paretovariate weibullvariate triangular _randbelow"
    ).split(),
    time: "time perf_counter time_ns perf_counter_ns monotonic monotonic_ns process_time process_time_ns".split(),
    os: ["urandom"],
}
CLOCKS = {time.time, time.perf_counter}
"""What they give is an argument of a graph; calls of `REFUSED_DRAWS` are refused."""
REFUSED_DRAWS = {getattr(of, name) for of in (time, os) for name in NAMES_OF[of] if hasattr(of, name)} - CLOCKS

DRAWN: dict[int, str] = {
    id(getattr(module, name)): f"{module.__name__}.{name}"
    for module, names in NAMES_OF.items()
    for name in names
    if hasattr(module, name)
}
"""By id, what people call them. Code may have them under a name of its own: `from time import time`."""
