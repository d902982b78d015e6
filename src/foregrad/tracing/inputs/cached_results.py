"""Results that functions under `functools.cache` and `lru_cache` keep: those made by a capture are taken out again.

The cache of such a function is C's, and nobody is told of what goes into it. But it counts its misses.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from ...frontend.expected import is_plain
from ...frontend.opaque import is_cached_function

__all__ = ["CachedFunctions", "FilledCaches", "cached_functions", "take_out"]

_LIBRARIES = frozenset({"torch", "sympy", "foregrad", "mpmath", "networkx", *sys.stdlib_module_names} - {"__main__"})
"""Whose cached functions keep no tensors."""


class CachedFunctions:
    """The functions of the process that keep results, but for those of libraries that keep no tensors."""

    def __init__(self) -> None:
        self._misses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._modules = 0

    def find(self, *, anew: bool = False) -> None:
        """Look for new ones, should a module have been imported since, or anyhow."""
        if self._modules == len(sys.modules) and not anew:
            return
        self._modules = len(sys.modules)
        for value in gc.get_objects():
            if is_cached_function(value) and str(value.__module__).partition(".")[0] not in _LIBRARIES:
                self._misses.setdefault(value, 0)

    def take_out(self, is_ours: Callable[[Any], bool]) -> list[str]:
        """Take the results of which `is_ours(result)` out of those that missed since the last time; their names."""
        found = []
        for cached, before in list(self._misses.items()):
            misses = cached.cache_info().misses
            if misses != before:
                self._misses[cached] = misses
                if take_out(cached, is_ours):
                    found.append(f"the cache of {getattr(cached, '__qualname__', 'a function')}")
        return found

    def keeper_of(self, value: Any) -> Any:
        """The known function that keeps this very object as a result, or in one; None if there is none."""
        for cached in list(self._misses):
            if any(_holds(kept, value) for kept in _kept_by(cached)[1].values()):
                return cached
        return None


class FilledCaches:
    """What a run adds to the caches of functions that are reached."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, int, frozenset[int]]] = {}

    def look(self, functions: Iterable[Any]) -> None:
        """Before the run, or before it comes to these."""
        for cached in functions:
            if id(cached) not in self._before:
                keys = frozenset(map(id, _kept_by(cached)[0]))
                self._before[id(cached)] = cached, cached.cache_info().misses, keys

    def filled(self) -> Any:
        """A function that ran, as its cache had no result; or None."""
        return next(
            (cached for cached, misses, _ in self._before.values() if cached.cache_info().misses != misses), None
        )

    def take_out(self, *, is_whole: bool) -> None:
        """The run is over. A capture that `is_whole` leaves plain results of plain arguments there, as eager does."""
        for cached, misses, keys in self._before.values():
            if cached.cache_info().misses != misses:
                table, results = _kept_by(cached)
                for key in [key for key in table if id(key) not in keys]:
                    if not (is_whole and is_plain(results.get(key, _NOTHING)) and not _is_traced(key)):
                        del table[key]


_NOTHING = object()
_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_traced(key: Any) -> bool:
    return any(isinstance(item, _TRACED) for item in (key if isinstance(key, (list, tuple)) else (key,)))


def take_out(cached: Callable[..., Any], is_ours: Callable[[Any], bool]) -> bool:
    """Take the results of which `is_ours(result)` out of the cache of a function; whether there were any."""
    table, results = _kept_by(cached)
    keys = [key for key, result in results.items() if key in table and is_ours(result)]
    for key in keys:
        del table[key]
    return bool(keys)


def _kept_by(cached: Callable[..., Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The dict behind a cache; the results by their keys.

    A function that keeps any number of results has a dict of them. One that keeps a limited number has a dict of links,
    whose keys and results it holds itself, one after the other, the oldest first; so the links that were taken out of
    the dict before: of the links of one key, the last is in use.
    """
    held = gc.get_referents(cached)
    attributes = getattr(cached, "__dict__", None)
    table = next((item for item in held if type(item) is dict and item is not attributes), {})
    kind: Any = type(next(iter(table.values()), None))
    return table, _results_of_links(held, kind) if kind.__name__ == "_lru_list_elem" else dict(table)


def _holds(kept: Any, value: Any) -> bool:
    items = kept.values() if type(kept) is dict else kept if type(kept) in (tuple, list) else ()
    return kept is value or any(item is value for item in items)


def _results_of_links(held: list[Any], kind: type) -> dict[Any, Any]:
    at = [index for index, item in enumerate(held) if item is kind and index > 1]
    return {held[index - 2]: held[index - 1] for index in at if isinstance(held[index - 2], Hashable)}


@functools.cache
def cached_functions() -> CachedFunctions:
    return CachedFunctions()
