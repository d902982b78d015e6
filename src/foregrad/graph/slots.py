"""Slots: descriptions of the inputs and outputs of a graph, one small value each, printable, comparable, nested.

Nothing downstream counts positions: wrappers, partitioners, reports and messages ask the slots. Slots nest
(`Grad(of=Param("w"))`, `Tangent(of=Grad(of=...))`), so they describe derivatives of any order.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Base of all slots."""


@dataclasses.dataclass(frozen=True, slots=True)
class Param(Slot):
    """A parameter, by its name as in `named_parameters`."""

    name: str

    def __str__(self) -> str:
        return f"parameter {self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer(Slot):
    """A buffer, by its name as in `named_buffers`."""

    name: str

    def __str__(self) -> str:
        return f"buffer {self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Input(Slot):
    """A tensor argument, by its path: `args[0]["x"]`."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclasses.dataclass(frozen=True, slots=True)
class Closure(Slot):
    """A tensor the function reaches by itself (closed over, global, an attribute), by its path."""

    path: str

    def __str__(self) -> str:
        return f"closed-over {self.path}"


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory(Slot):
    """The whole memory that several inputs share, one of which is written to (a synthetic base)."""

    of: tuple[Slot, ...]

    def __str__(self) -> str:
        return f"memory shared by {', '.join(map(str, self.of))}"


@dataclasses.dataclass(frozen=True, slots=True)
class Output(Slot):
    """A tensor the function returns, by its path in the result: `out["loss"]`."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclasses.dataclass(frozen=True, slots=True)
class Part(Slot):
    """A plain tensor in a wrapper subclass, by its path in that."""

    of: Slot
    path: str

    def __str__(self) -> str:
        return f"{self.of}{self.path}"


@dataclasses.dataclass(frozen=True, slots=True)
class Updated(Slot):
    """The value an input has after the call, which the runtime writes back."""

    of: Slot

    def __str__(self) -> str:
        return f"updated {self.of}"


@dataclasses.dataclass(frozen=True, slots=True)
class Base(Slot):
    """An intermediate that outputs are views of; the runtime takes the views from it."""

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

    where: str

    def __str__(self) -> str:
        return f"checked at {self.where}"


@dataclasses.dataclass(frozen=True, slots=True)
class Live(Slot):
    """The contents of an input when the backward runs."""

    of: Slot

    def __str__(self) -> str:
        return f"{self.of}, when the backward runs"


@dataclasses.dataclass(frozen=True, slots=True)
class Tangent(Slot):
    """The gradient that comes in for an output (a cotangent, strictly)."""

    of: Slot

    def __str__(self) -> str:
        return f"tangent of {self.of}"


@dataclasses.dataclass(frozen=True, slots=True)
class Grad(Slot):
    """The gradient that goes out to an input."""

    of: Slot

    def __str__(self) -> str:
        return f"gradient of {self.of}"


@dataclasses.dataclass(frozen=True, slots=True)
class Saved(Slot):
    """A value the forward keeps for the backward, by its node's name."""

    name: str

    def __str__(self) -> str:
        return f"saved {self.name}"
