"""Slots: descriptions of the inputs and outputs of a graph, one small value each, printable, comparable, nested.

Nothing downstream counts positions: wrappers, partitioners, reports and messages ask the slots. Slots nest
(`Grad(of=Param("w"))`, `Tangent(of=Grad(of=...))`), so they describe derivatives of any order.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Base of all slots; `words` describes the kind."""

    words = ""

    def __str__(self) -> str:
        return self.words.format(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Param(Slot):
    """A parameter, by its name as in `named_parameters`."""

    words = "parameter {0.name}"
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer(Slot):
    """A buffer, by its name as in `named_buffers`."""

    words = "buffer {0.name}"
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Input(Slot):
    """A tensor argument, by its path: `args[0]["x"]`."""

    words = "{0.path}"
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Closure(Slot):
    """A tensor the function reaches by itself (closed over, global, an attribute), by its path."""

    words = "closed-over {0.path}"
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory(Slot):
    """The whole memory of several inputs, some of them written (a synthetic base)."""

    of: tuple[Slot, ...]

    def __str__(self) -> str:
        return f"memory shared by {', '.join(map(str, self.of))}"


@dataclasses.dataclass(frozen=True, slots=True)
class Output(Slot):
    """A tensor the function returns, by its path in the result: `out["loss"]`."""

    words = "{0.path}"
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Part(Slot):
    """A plain tensor in a wrapper subclass, by its path."""

    words = "{0.of}{0.path}"
    of: Slot
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Updated(Slot):
    """The value an input has after the call; the runtime writes it back."""

    words = "updated {0.of}"
    of: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Base(Slot):
    """An intermediate that outputs are views of; the runtime takes the views."""

    of: tuple[Slot, ...]

    def __str__(self) -> str:
        return f"base of {', '.join(map(str, self.of))}"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision(Slot):
    """A value that the program branched on, or took a size from; `where` is the line that read it.

    `is_open`: the value is a size, and the graph serves other sizes too.
    """

    where: str
    is_open: bool = False

    def __str__(self) -> str:
        return f"size found at {self.where}" if self.is_open else f"decided at {self.where}"


@dataclasses.dataclass(frozen=True, slots=True)
class Checked(Slot):
    """An argument of an operator without results, by the line that calls it."""

    words = "checked at {0.where}"
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Live(Slot):
    """The contents of an input when the backward runs."""

    words = "{0.of}, when the backward runs"
    of: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Tangent(Slot):
    """The gradient that comes in for an output (a cotangent, strictly)."""

    words = "tangent of {0.of}"
    of: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Grad(Slot):
    """The gradient that goes out to an input."""

    words = "gradient of {0.of}"
    of: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Saved(Slot):
    """A value the forward keeps for the backward, by its node's name."""

    words = "saved {0.name}"
    name: str
