"""The tape: what the recorder writes, one `Entry` per operator, before anything is turned into an fx graph.

An fx node costs about 20 us to make and most tapes hold entries nobody needs (replayed views, overwritten
values), so the graph is built once, at the end, from the entries that matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...graph.collectives import Collective
from ...graph.meta import TensorSpec
from ...graph.python_calls import call_of


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Entry:
    """One value on the tape: an operator and its arguments, or an input (`target` is None) or a constant.

    `spec` is as in `NodeMeta`. `origin` is whatever `Origins.here()` returned. `is_backward` says which half it was
    recorded in; `sequence_nr` links a backward entry to the forward operator it differentiates.
    """

    target: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    spec: TensorSpec | tuple[Any, ...] | None = None
    name: str | None = None
    origin: Any = None
    original: Any = None  # the operator that the user's program called, when this is part of its decomposition
    sequence_nr: int | None = None
    is_backward: bool = False
    has_effect: bool = False
    recompute: Any = None
    constant: Any = None  # the real tensor, when this is a constant
    value: Any = None  # its value, once evaluated ahead of time (see constants.py)

    @property
    def is_collective(self) -> bool:
        """Whether this is a collective that the program called by itself, which other processes wait for."""
        is_functional = getattr(self.target, "namespace", "") == "_c10d_functional"
        return self.has_effect and (is_functional or isinstance(call_of(self.target, self.args), Collective))

    def __repr__(self) -> str:
        return f"Entry({self.name or self.target})"


def map_entries(value: Any, fn: Callable[[Entry], Any]) -> Any:
    """`value` with `fn` applied to every entry in it, through lists, tuples, dicts and slices."""
    cls = type(value)
    if cls is Entry:
        return fn(value)
    if cls in _LEAVES:
        return value
    if isinstance(value, (list, tuple)):
        mapped = [fn(item) if type(item) is Entry else map_entries(item, fn) for item in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    if isinstance(value, dict):
        return {key: map_entries(item, fn) for key, item in value.items()}
    return value


def entries_in(value: Any) -> Iterator[Entry]:
    """Every entry in `value`, in order."""
    if isinstance(value, Entry):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from entries_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from entries_in(item)


class Tape:
    """An ordered list of entries."""

    def __init__(self, origins: dict[int, Any] | None = None) -> None:
        self.entries: list[Entry] = []
        # Where each forward operator was called, by autograd sequence number.
        self.origins: dict[int, Any] = {} if origins is None else origins
        self.checkpoint_names: dict[Entry, tuple[str, ...]] = {}  # what the user calls the value of an entry

    def append(self, entry: Entry) -> Entry:
        self.entries.append(entry)
        return entry

    def forward(self) -> list[Entry]:
        """The entries that no backward recorded."""
        return [entry for entry in self.entries if not entry.is_backward]

    def with_operator(self, holds: Callable[[Any], bool]) -> list[Entry]:
        """The entries whose operator `holds` is true of; it is asked once for each operator."""
        found = {key for key, target in {id(e.target): e.target for e in self.entries}.items() if holds(target)}
        return [entry for entry in self.entries if id(entry.target) in found] if found else []

    def live(self, outputs: Iterable[Any]) -> list[Entry]:
        """The entries that `outputs` or an effect (a random number drawn, a collective) need, in order."""
        needed = self.needed([*outputs, *(entry for entry in self.entries if entry.has_effect)])
        return [entry for entry in self.entries if entry in needed]

    def needed(self, outputs: Iterable[Any]) -> set[Entry]:
        """The entries that `outputs` need."""
        needed: set[Entry] = set()
        stack: list[Any] = list(outputs)
        pop, push = stack.pop, stack.extend
        while stack:
            value = pop()
            cls = type(value)
            if cls is Entry:
                if value in needed:
                    continue
                needed.add(value)
                push(value.args)
                if value.kwargs:
                    push(value.kwargs.values())
            elif cls is list or cls is tuple:
                push(value)
            elif cls not in _LEAVES:
                push(entries_in(value))
        return needed


_LEAVES = {int, float, bool, str, type(None)}


# -------------------------------------------------------------------- capturing again
# Why a capture starts over: it found out what it should have known from the beginning.


class CaptureAgain(BaseException):
    """Raised to start capture over, knowing more. No error, and nothing for the user's code to catch."""


class NumberVaries(CaptureAgain):
    """Raised to start capture over: the numbers that the line `where` reads from tensors become symbolic."""

    def __init__(self, where: str) -> None:
        super().__init__(f"the number read at {where} is of a tensor that the call has changed")
        self.where = where


class SharedClosureFound(CaptureAgain):
    """Raised to start capture over with more tensors lifted from the beginning. `found`: pairs (tensor, source)."""

    def __init__(self, *found: tuple[torch.Tensor, Any]) -> None:
        super().__init__("a closed-over tensor is an input, or shares memory with one")
        self.found = found
