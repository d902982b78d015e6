"""The lines that draw, compute with arrays that were drawn, and make tensors of them, before a graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..frontend.lifted import ConstantArray, Converted, Draw, DrawnValue, GivenArray, Items, Step
from ..graph.spelling import item, literal

__all__ = ["DrawLines"]


class DrawLines:
    """`lines` so far, in order; `arrays` are the variables of the arrays that were drawn. `states`: how many of the
    arguments are none of the user's.
    """

    def __init__(self, bind: Callable[[str, Any], str], states: int) -> None:
        self.bind, self.states = bind, states
        self.lines: list[str] = []
        self.arrays: list[str] = []
        self._values: list[str] = []  # variables, by the number of the draw
        self._steps: list[tuple[Step, str]] = []

    def place(self, place: Draw | Converted) -> str:
        """The lines of one place; what stands for it among the state."""
        if isinstance(place, Converted):
            return f"{self.bind('from_numpy', torch.from_numpy)}({self._spelled(place.value)})"
        name = f"drawn_{len(self._values)}"
        self._values.append(name)
        function = self.bind(place.path.partition("(")[0].rpartition(".")[2], place.function)
        self.lines.append(f"{name} = {self._call(function, place.args, place.kwargs)}")
        if place.is_array:
            self.arrays.append(name)
        return "None" if place.is_array else name

    def _call(self, function: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
        given = [*map(self._spelled, args), *(f"{key}={self._spelled(value)}" for key, value in kwargs)]
        return f"{function}({', '.join(given)})"

    def _spelled(self, value: Any) -> str:
        if isinstance(value, DrawnValue):
            return self._values[value.number]
        if isinstance(value, Step):
            return self._step(value)
        if isinstance(value, GivenArray):
            assert value.way is not None
            first, *keys = value.way
            text = f"args[{first + self.states}]" if type(first) is int else item("kwargs", first, self.bind)
            for key in keys:
                text = item(text, key, self.bind)
            return text
        if isinstance(value, Items):
            return f"[{', '.join(map(self._spelled, value))}]"
        if isinstance(value, ConstantArray):
            return self.bind("constant_array", value.value)
        if type(value) is tuple:
            return f"({''.join(self._spelled(item) + ', ' for item in value)})"
        return literal(value) or self.bind("constant", value)

    def _step(self, step: Step) -> str:
        for known, name in self._steps:
            if known.is_same(step):
                return name
        if isinstance(step.function, str):
            call = self._call(f"{self._spelled(step.args[0])}.{step.function}", step.args[1:], step.kwargs)
        else:
            call = self._call(self.bind(step.function.__name__, step.function), step.args, step.kwargs)
        name = f"array_{len(self._steps)}"
        self.lines.append(f"{name} = {call}")
        self._steps.append((step, name))
        return name
