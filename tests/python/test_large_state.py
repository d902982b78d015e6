"""State too large to copy in vain: what a function writes there, and what it reads, is eager's in each call."""

from __future__ import annotations

import array
import collections
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import foregrad

pytestmark = pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")

MANY = 20_000
compile_softly = functools.partial(foregrad.compile, backend="eager", on_unsupported="eager")


class Item:
    def __init__(self, value: float) -> None:
        self.value = value


def _add_to_value(items: Any) -> float:
    items[5].value += 1
    return float(items[5].value)


def _add_to_item(items: Any) -> float:
    items[5] += 1
    return float(items[5])


def _add_at_two(items: Any) -> float:
    items[5, 2] += 1
    return float(items[5, 2])


def _add_inside(items: Any) -> float:
    items[5][0] += 1
    return float(items[5][0])


def _replace(items: Any) -> float:
    items[5] = [items[5][0] + 1]
    return float(items[5][0])


def _objects() -> Any:
    made = np.empty(8, dtype=object)
    made[:] = [[i] for i in range(8)]
    return made


STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a list of objects": (lambda: [Item(i) for i in range(MANY)], _add_to_value),
    "a dict of objects": (lambda: {i: Item(i) for i in range(MANY)}, _add_to_value),
    "a tuple of lists": (lambda: tuple([i] for i in range(MANY)), _add_inside),
    "a deque of lists": (lambda: collections.deque([i] for i in range(MANY)), _add_inside),
    "a list of deques": (lambda: [collections.deque([i]) for i in range(MANY)], _add_inside),
    "a dict of numbers": (lambda: dict.fromkeys(range(MANY), 0.0), _add_to_item),
    "numbers of NumPy": (lambda: np.zeros(1 << 18), _add_to_item),
    "more numbers of NumPy": (lambda: np.zeros((1 << 26) + 1, dtype=np.int8), _add_to_item),
    "bytes": (lambda: bytearray(1 << 21), _add_to_item),
    "an array": (lambda: array.array("d", bytes(1 << 21)), _add_to_item),
    "a view of bytes": (lambda: memoryview(bytearray(1 << 21)), _add_to_item),
    "a view of two dimensions": (lambda: memoryview(bytearray(64)).cast("B", (8, 8)), _add_at_two),
    "a view with gaps": (lambda: memoryview(bytearray(64))[::2], _add_to_item),
    "objects of NumPy": (_objects, _add_inside),
    "replaced objects of NumPy": (_objects, _replace),
}


@pytest.mark.parametrize("name", STATE)
def test_writes_are_those_of_eager(name: str) -> None:
    make, write = STATE[name]

    def step(state: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * write(state)

    eager, compiled = step(make()), compile_softly(step(make()))
    for _ in range(4):
        assert torch.equal(compiled(torch.ones(2)), eager(torch.ones(2)))


def _changes(items: Any) -> None:
    items[5].value += 1


def test_reads_of_a_large_container_are_those_of_eager() -> None:
    items = [Item(i) for i in range(MANY)]

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * items[5].value

    compiled = compile_softly(read)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), read(torch.ones(2)))
        _changes(items)
    with pytest.raises(
        foregrad.errors.UnsupportedSideEffectError, match=r"`items` has 20,000 items, among them an Item"
    ):
        foregrad.compile(read, backend="eager", on_unsupported="raise")(torch.ones(2))


class _Link:
    def __init__(self, rest: _Link | None, value: float) -> None:
        self.rest, self.value = rest, value


def test_reads_behind_many_objects_are_those_of_eager() -> None:
    last = _Link(None, 1.0)
    first = last
    for _ in range(150):
        first = _Link(first, 0.0)

    def read(x: torch.Tensor) -> torch.Tensor:
        link = first
        while link.rest is not None:
            link = link.rest
        return x * link.value

    compiled = compile_softly(read)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), read(torch.ones(2)))
        last.value += 1


def test_large_state_that_no_code_names_is_left_alone() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.samples = [Item(i) for i in range(MANY)]
            self.frames = np.zeros((1 << 26) + 1, dtype=np.int8)
            self.scale = 2.0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

        def sample(self, index: int) -> float:
            return self.samples[index].value + float(self.frames[index])

    trainer = Trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", foregrad.errors.ForegradWarning)
        compiled = compile_softly(trainer.step)
        assert torch.equal(compiled(torch.ones(2)), 2 * torch.ones(2))


def test_plain_values_and_tensors_of_a_large_container_are_compiled() -> None:
    words = {f"word {i}": i for i in range(MANY)}
    tensors = [torch.tensor(float(i)) for i in range(10_001)]

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * words["word 7"] + tensors[3]

    compiled = foregrad.compile(read, backend="eager", on_unsupported="raise")
    for value in (7, 8):
        words["word 7"] = value
        tensors[3] = torch.tensor(float(value))
        assert torch.equal(compiled(torch.ones(2)), read(torch.ones(2)))


def test_thousands_of_containers_among_arguments_and_results_compile():
    table = {i: [torch.full((1,), float(i))] for i in range(2500)}

    def function(x, values):
        return {key: [x * value] for key, (value,) in values.items()}

    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for i in range(2):
        table[7][0] = torch.full((1,), 100.0 + i)
        assert compiled(torch.ones(1), table) == function(torch.ones(1), table)
    assert len(compiled.foregrad.compilations) == 1
