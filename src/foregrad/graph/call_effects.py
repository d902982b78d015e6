"""Effects around the graph: actions of a call besides running the graph and replaying the effect log.

An effect is one frozen class. It has a place in the rendered call, lines, checks of numbers from a file, a text for
people, and says whether a file may hold the effect. The runtime, files and views loop over `Signature.effects.around`
and name no class. Effects at one place are rendered in the order of their ranks, then in the order of recording.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from .._torch.histories import have_hooks, lead_to
from .._torch.tensors import of_other_mode
from ..errors import UnsupportedError
from ..house import add_to_house

_NO_GRADIENT = "set it to None at the end (`zero_grad()`), or use torch.autograd.grad"


class CallPlace(enum.Enum):
    """Where in a rendered call an effect's lines stand.

    `FIRST`: before everything. `GRAPH`: after the graph has run and its decisions were checked. `RESULTS`: after all
    results exist. `LEFT`: at the end, for the program's code that runs after the call.
    """

    FIRST = enum.auto()
    GRAPH = enum.auto()
    RESULTS = enum.auto()
    LEFT = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class EffectTarget:
    """The tensor that an effect changes: an input, or a leaf of the result, by its number. Tensors
    that are taken apart have numbers after all inputs.
    """

    number: int
    is_input: bool = False

    def __str__(self) -> str:
        return f"{'input' if self.is_input else 'result'} {self.number}"


class EffectWriter(Protocol):
    """Names for an effect's lines. Each method returns an expression of the rendered call."""

    def bind(self, hint: str, value: object) -> str:
        """A global name for a value."""

    def built(self, value: object) -> str:
        """A value; each call makes its containers anew."""

    def target(self, target: EffectTarget) -> str:
        """The tensor that an effect changes."""

    def input(self, number: int) -> str: ...
    def output(self, number: int) -> str:
        """An output of the graph."""

    def result(self, number: int) -> str:
        """A leaf of the result."""


class Bounds(Protocol):
    """Checks of numbers from a file: each method raises `ForegradError` for a number that does not exist."""

    def inputs(self, numbers: Iterable[int]) -> None: ...
    def outputs(self, numbers: Iterable[int]) -> None: ...
    def results(self, numbers: Iterable[int]) -> None: ...


KINDS: dict[str, type[CallEffect]] = {}  # each kind by its name in files


def kind_name(cls: type) -> str:
    """The name of a kind of effects in files. Kinds of two other packages never have one name."""
    is_own = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return cls.__name__ if is_own else f"{cls.__module__}.{cls.__qualname__}"


@dataclasses.dataclass(frozen=True, slots=True)
class CallEffect:
    """Base of the effects. `rank`: the order among the effects at one `place`.

    `storable`: files may hold the effect: its fields are numbers, plain values and `EffectTarget`s, and its `check`
    tests all numbers that `lines` uses. `instead`: the remedy if files may not. `sees_gradients`: the effect
    shows gradients to the program or to `.grad`, so the backward must not run in stages.
    """

    place: ClassVar[CallPlace]
    rank: ClassVar[int] = 0
    storable: ClassVar[bool] = False
    sees_gradients: ClassVar[bool] = False
    instead: ClassVar[str] = "do it outside of the function"

    def __init_subclass__(cls) -> None:  # a class with slots is made twice
        known = KINDS.setdefault(kind_name(cls), cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"two kinds of effects have the name {cls.__name__}: {known.__module__}, {cls.__module__}")
        KINDS[kind_name(cls)] = cls
        add_to_house(cls)

    def lines(self, writer: EffectWriter) -> list[str]:
        """Lines of the rendered call at the effect's place."""
        return []

    def around(self, writer: EffectWriter) -> list[str]:
        """Contexts around the graph."""
        return []

    def check(self, bounds: Bounds) -> None:
        """Raise `ForegradError` unless the effect's numbers exist."""

    def __str__(self) -> str:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEffect(CallEffect):
    """Base of the effects on one tensor."""

    target: EffectTarget

    def check(self, bounds: Bounds) -> None:
        (bounds.inputs if self.target.is_input else bounds.results)([self.target.number])


def at_place(effects: Sequence[CallEffect], place: CallPlace) -> list[CallEffect]:
    """The effects at one place, in the order of their lines."""
    return sorted((effect for effect in effects if effect.place is place), key=lambda effect: effect.rank)


class ObjectWriter(Protocol):
    """Material for the line of an `ObjectWrite`. `containers`: the variable of each container among the arguments."""

    containers: Mapping[int, str]

    def bind(self, hint: str, value: object) -> str:
        """A global name for a value."""


class ObjectWrite(Protocol):
    """A write to an object of the program, at the end of a call. `path` is the place for people. `counts`: a number
    takes a number's place, as in a counter; `is_to_argument`: the object is an argument's; `place`: the single place
    that the write sets, or None; `is_said`: it is text for the console.
    """

    @property
    def path(self) -> str: ...
    @property
    def target(self) -> Any: ...
    @property
    def counts(self) -> bool: ...
    @property
    def is_to_argument(self) -> bool: ...
    @property
    def place(self) -> Any: ...
    @property
    def is_said(self) -> bool: ...
    @property
    def is_print(self) -> bool: ...
    def line(self, writer: ObjectWriter, values: Sequence[str]) -> str:
        """The line of the rendered call; `values`: the expressions of all written values."""


class OldObject:
    """Base of the leaves that stand for an object older than the call."""

    __slots__ = ()

    def expression(self, writer: ObjectWriter) -> str:
        """The object, in a line of the rendered call."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------ before the graph


@dataclasses.dataclass(frozen=True, slots=True)
class KeepApart(CallEffect):
    """The function takes a gradient by the inputs `targets`: the histories of `others` must not lead to these, and
    `targets` must have no hooks. Any other call raises `UnsupportedError` with `message`.
    """

    targets: tuple[int, ...]
    others: tuple[int, ...]
    message: str
    place = CallPlace.FIRST
    rank = 1
    storable = True

    def lines(self, writer: EffectWriter) -> list[str]:
        lists = (f"[{', '.join(map(writer.input, group))}]" for group in (self.others, self.targets))
        check = writer.bind("check_apart", check_apart)
        return [f"{check}({', '.join(lists)}, {writer.bind('said', self.message)})"]

    def check(self, bounds: Bounds) -> None:
        bounds.inputs((*self.targets, *self.others))

    def __str__(self) -> str:
        return f"inputs {self.others} are looked at for histories that lead to inputs {self.targets}"


def check_apart(others: list[torch.Tensor], targets: list[torch.Tensor], message: str) -> None:
    if have_hooks(targets) or lead_to(others, targets):
        raise UnsupportedError(message)


@dataclasses.dataclass(frozen=True, slots=True)
class ClearGradient(TensorEffect):
    """`.grad` of an input becomes None before the graph runs, so its memory is free for the graph."""

    place = CallPlace.FIRST
    rank = 2
    sees_gradients = True
    instead = _NO_GRADIENT

    def lines(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.target(self.target)}.grad = None"]

    def __str__(self) -> str:
        return f"set .grad of {self.target} to None, first of all"


# ------------------------------------------------------------------------------------------------ around the graph


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeInference(CallEffect):
    """A graph output becomes an inference tensor where the graph runs outside of inference mode, or the reverse."""

    output: int
    place = CallPlace.GRAPH
    storable = True

    def lines(self, writer: EffectWriter) -> list[str]:
        name = writer.output(self.output)
        return [f"{name} = {writer.bind('of_other_mode', of_other_mode)}({name})"]

    def check(self, bounds: Bounds) -> None:
        bounds.outputs([self.output])

    def __str__(self) -> str:
        return f"output {self.output} changes between normal and inference tensor"


# ------------------------------------------------------------------------------------------------ on results


@dataclasses.dataclass(frozen=True, slots=True)
class RetainGradient(TensorEffect):
    """`retain_grad()` on an input or a result."""

    place = CallPlace.RESULTS
    storable = True

    def lines(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.target(self.target)}.retain_grad()"]

    def __str__(self) -> str:
        return f"retain_grad() on {self.target}"


@dataclasses.dataclass(frozen=True, slots=True)
class MakeParameter(TensorEffect):
    """A result is a `torch.nn.Parameter` that the function makes."""

    place = CallPlace.RESULTS
    rank = 2
    storable = True

    def lines(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.target(self.target)}.__class__ = {writer.bind('Parameter', torch.nn.Parameter)}"]

    def __str__(self) -> str:
        return f"{self.target} becomes a parameter"


@dataclasses.dataclass(frozen=True, slots=True)
class GiveAttribute(TensorEffect):
    """An attribute of a result that the function makes."""

    name: str
    value: Any
    place = CallPlace.RESULTS
    rank = 3
    storable = True

    def lines(self, writer: EffectWriter) -> list[str]:
        set_attribute = writer.bind("set_attribute", _set_attribute)
        arguments = writer.target(self.target), writer.bind("attribute", self.name), writer.built(self.value)
        return [f"{set_attribute}({', '.join(arguments)})"]

    def __str__(self) -> str:
        return f"set attribute {self.name} of {self.target}"


def _set_attribute(result: torch.Tensor, name: str, value: object) -> None:
    setattr(result, name, value)


# ------------------------------------------------------------------------------------------------ left by the call


@dataclasses.dataclass(frozen=True, slots=True)
class SetGradient(TensorEffect):
    """`.grad` of an input becomes leaf `result` of the result, or None."""

    result: int | None
    place = CallPlace.LEFT
    rank = 1
    sees_gradients = True
    instead = _NO_GRADIENT

    def lines(self, writer: EffectWriter) -> list[str]:
        return [f"{writer.target(self.target)}.grad = {'None' if self.result is None else writer.result(self.result)}"]

    def __str__(self) -> str:
        return f"set .grad of {self.target} to {'None' if self.result is None else f'result {self.result}'}"
