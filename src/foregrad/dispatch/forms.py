"""The forms of a function: what calls go to that its own graphs are not for.

A form is another function, which a dispatcher of its own compiles. There are three: the function with tensors of
classes taken apart; the function again, for arguments of certain sizes (`np.random.permutation(x.shape[0])` draws
otherwise for others); and the function with some of its state, or what it draws, as an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch

from .explain import Difference
from .guard_list import MISS
from .refusals import Once

__all__ = ["Form", "Outer", "sizes_of"]


D = TypeVar("D")


class Form(Generic[D]):
    """`made` has by the kind of call, which `kind(args, kwargs)` tells, a dispatcher and what gives the call to it.

    None is no kind. `takes_all`: every call is of the kind True.
    """

    def __init__(self, kind: Callable[..., Any] | None = None) -> None:
        self.kind, self.takes_all = kind, kind is None
        self.made: dict[Any, tuple[D, Callable[..., Any]]] = {}

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call; `MISS` where it is of no kind that there is something for."""
        if not self.made:
            return MISS
        kind = True if self.takes_all or self.kind is None else self.kind(args, kwargs)
        made = self.made.get(kind)
        return MISS if made is None else made[1](args, kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
    """What the dispatcher of a form learns from the one that has the form.

    `why`: for each graph of the function that takes less of its state as an argument, why that was not right.
    `only_written`: containers that calls add to and do not read. `varied`: lines at which numbers are read that vary.
    `splits_sizes`: whether it may have forms for sizes. `once`: the warning of all of them.
    """

    why: tuple[Difference, ...] = ()
    only_written: set[tuple[int, Any]] = dataclasses.field(default_factory=set)
    varied: frozenset[str] = frozenset()
    splits_sizes: bool = True
    once: Once = dataclasses.field(default_factory=Once)


def sizes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The sizes of the arguments of a call, and the integers among them."""
    return tuple(map(_size_of, args)), tuple((name, _size_of(value)) for name, value in kwargs.items())


def _size_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return tuple(map(_size_of, value))
    if isinstance(value, dict):
        return tuple(map(_size_of, value.values()))
    return value if type(value) is int else None
