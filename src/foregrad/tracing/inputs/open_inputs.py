"""Tensors that open, among a capture's inputs: the capture's questions, and the answers where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from ...frontend.openings import FoundOpenings, Opening, Unwrap, opener
from ...frontend.tree import Tree, flatten
from ...identity import ById


class OpenInput(Protocol):
    """An input that opens, `real`. `hung`: its attributes besides its class's own; `history`: of its stand-in."""

    real: Any
    stand_in: Any
    slot: str
    source: Any
    parts: tuple[Any, ...]
    hung: dict[str, Any]
    history: tuple[bool, Any]
    start_version: int
    is_of_torch: bool

    def told_apart(self, names: Iterable[str]) -> frozenset[str]: ...
    def attributes_set(self) -> list[str]: ...
    def is_given_gradient(self) -> bool: ...


class OpenInputs:
    """The inputs that open in one capture: here none, and each is refused by the seam's name.

    `plain`: the plain tensors among the inputs, by their stand-ins.
    """

    def __init__(self, samples: Any, recorder: Any, plain: ById[torch.Tensor, Any]) -> None:
        self.samples, self.recorder, self.plain = samples, recorder, plain
        self.inputs: list[Any] = []  # of arguments, each as often as it comes; then those reached besides
        self.by_stand_in: ById[Any, Any] = ById()
        self.leaves: list[Any] = []  # of the result: each tensor that opens is one
        self.made: ById[Any, Sequence[Any]] = ById()  # by an object made of results of the graph: these results
        self.taken_apart: list[tuple[Any, Sequence[Any]]] = []  # objects with gradients, and their plain tensors

    def of_argument(self, array_of: Callable[[object], object], spec: Any, parts: Sequence[object]) -> object:
        """The stand-in of an argument, over the stand-ins of its plain tensors; `array_of` makes arrays'."""
        return array_of(*parts)

    def adopt(self, real: Any, *how: Any) -> Any:
        opener()

    def find(self, tensor: object) -> OpenInput | None:
        """The input that a tensor is, or stands for."""

    def check_history(self, tensor: object, call: str, where: str) -> None:
        """Raise where `call` would change the history of an input, or of a view of any tensor that opens."""

    def unwrap(self, stand_in: object) -> tuple[Opening, Sequence[Any]] | None:
        """The plain stand-ins of an argument; None for any other tensor."""

    def of_results(self, results: object, adopt: Callable[[Any], object]) -> Unwrap:
        """A function that opens tensors among the function's results."""
        self.leaves = flatten(results, lambda _: None)[0]
        return self.adopt

    def returned(self, value: object, adopt: Callable[[Any], object]) -> int | None:
        """The input that a tensor among the results is."""

    def check(self) -> None:
        """Raise where the function changed an input in a way that no compiled call does."""

    def check_gradients(self) -> None:
        """Raise where the capture is to begin again, with known kinds of gradients."""

    def in_gradients(self, returned: Any, differentiable: Sequence[int]) -> dict[str, Any]:
        """Fields of the signature's `GradientInfo`."""
        return {}

    def writes(self) -> Sequence[tuple[Any, int]]:
        """The inputs that were written to, and how often."""
        return ()

    def found(self, tree: Tree) -> FoundOpenings | None:
        """All inputs that open; None where there is none. `tree` is the arguments'."""
