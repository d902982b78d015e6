"""The forms of a function that draws otherwise for arguments of other sizes: `np.random.permutation(x.shape[0])`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["BySizes"]

Call = Callable[[tuple[Any, ...], Any], Any]


class BySizes:
    """Calls `first`, or what was made of the function for arguments of these sizes. `make()` makes another form."""

    def __init__(self, make: Callable[[], Dispatcher], most: int) -> None:
        self.make, self.most = make, most
        self.others: dict[Any, Dispatcher] = {}

    def call(self, first: Call) -> Call:
        """What calls one of the others, or `first`."""

        def by_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            other = self.others.get(_sizes_of(args, kwargs))
            return first(args, kwargs) if other is None else other.entry(*args, **kwargs)

        return by_sizes

    def other(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dispatcher | None:
        """A new form for a call that `first` was not right for; None where there are too many."""
        key = _sizes_of(args, kwargs)
        if key not in self.others and len(self.others) < self.most:
            self.others[key] = self.make()
        return self.others.get(key)


def _sizes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return tuple(map(_size_of, args)), tuple((name, _size_of(value)) for name, value in kwargs.items())


def _size_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return tuple(map(_size_of, value))
    if isinstance(value, dict):
        return tuple(map(_size_of, value.values()))
    return value if type(value) is int else None
