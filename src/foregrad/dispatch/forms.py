"""The forms of a function: other functions that take calls which its own graphs can't serve.

Each form has a dispatcher of its own. There are three: the function with tensors of classes taken apart; the function
for arguments of certain sizes (`np.random.permutation(x.shape[0])` draws otherwise for other sizes); and the function
with some of its state, or its draws, as an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch

from .explain import Difference
from .guard_list import MISS
from .refusals import Once

D = TypeVar("D")


class Form(Generic[D]):
    """A form, by kinds of calls. `entries`: for each kind, a dispatcher and the function that hands it the call.

    `kind(args, kwargs)` is the kind of a call; None for a call that the form does not take. `takes_all`: every call is
    of the kind True.
    """

    def __init__(self, kind: Callable[..., Any] | None = None) -> None:
        self.kind, self.takes_all = kind, kind is None
        self.entries: dict[Any, tuple[D, Callable[..., Any]]] = {}

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call; `MISS` if there is no entry for its kind."""
        if not self.entries:
            return MISS
        kind = True if self.takes_all or self.kind is None else self.kind(args, kwargs)
        entry = self.entries.get(kind)
        return MISS if entry is None else entry[1](args, kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
    """Facts that the dispatcher of a form gets from the function's dispatcher.

    `why`: for each graph of the function, the reason why it was not right before this state became an argument.
    `only_written`: containers that calls add to and do not read. `varied`: lines that read numbers that vary.
    `splits_sizes`: whether the form may have forms for sizes itself. `once`: the warning shared by all forms.
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
