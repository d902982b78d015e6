"""Sizes and strides of wrappers that vary from call to call: expressions of the sizes of the plain tensors inside."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.jagged import coefficient, is_ragged, ragged_size
from .._torch.symbols import concrete, expression_text, has_symbolic, is_symbolic
from ..errors import UnsupportedTensorError
from ..graph.source import compile_source

__all__ = ["OuterSizes", "concrete_sizes", "outer_sizes"]

Sizes = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class OuterSizes:
    """`shape` and `stride` of a wrapper: plain numbers, and Python expressions of `parts`, its plain tensors."""

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]

    def of(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Size, Sizes]:
        """The size and the strides of the wrapper around these plain tensors."""
        shape, stride = _function(f"{_row(self.shape)}, {_row(self.stride)}")(parts)
        return torch.Size(shape), stride


def outer_sizes(
    cls: type, shape: Sizes, stride: Sizes, parts: Sequence[torch.Tensor], ragged: int | None = None
) -> OuterSizes | None:
    """The sizes of a wrapper as expressions of the sizes of `parts`; None if no size is symbolic. `ragged`: the part
    that ragged sizes belong to.

    Raises `UnsupportedTensorError` if a size depends on one that no plain tensor has.
    """
    if not has_symbolic(shape) and not has_symbolic(stride):
        return None
    places: dict[Any, str] = {None: f"ragged_size(parts[{ragged}], {{}})"}
    for number, part in enumerate(parts):
        _note(places, part.shape, f"parts[{number}].shape[{{}}]")
    for number, part in enumerate(parts):
        _note(places, part.stride(), f"parts[{number}].stride({{}})")
    return OuterSizes(_texts(cls, shape, places), _texts(cls, stride, places))


def _note(places: dict[Any, str], numbers: Any, place: str) -> None:
    for dim, number in enumerate(numbers):
        if is_symbolic(number):
            places.setdefault(number.node.expr, place.format(dim))


def _texts(cls: type, numbers: Sizes, places: dict[Any, str]) -> tuple[int | str, ...]:
    texts: list[int | str] = []
    for number in numbers:
        if not is_symbolic(number):
            texts.append(number)
            continue
        if is_ragged(number):
            texts.append(places[None].format(coefficient(number)))
            continue
        expression = number.node.expr
        if expression in places:
            texts.append(places[expression])
            continue
        if not all(symbol in places for symbol in expression.free_symbols):
            raise UnsupportedTensorError(
                f"a {cls.__qualname__} has a size that varies from call to call and that no tensor inside it has. "
                "Compile with dynamic=False."
            )
        texts.append(expression_text(expression, places, _global))
    return tuple(texts)


def concrete_sizes(numbers: Sizes) -> tuple[int, ...]:
    """Sizes as plain numbers: a symbolic size has its value at capture, a ragged size is -1."""
    return tuple(-1 if is_ragged(number) else concrete(number) for number in numbers)


def _row(numbers: Sizes) -> str:
    return "".join(["(", *(f"{number}, " for number in numbers), ")"])


def _global(name: str, value: Any) -> str:
    _globals[name] = value
    return name


_globals: dict[str, Any] = {"ragged_size": ragged_size}


@functools.lru_cache(maxsize=1024)
def _function(text: str) -> Callable[[Sequence[torch.Tensor]], Any]:
    source = f"def sizes(parts):\n    return {text}\n"
    return compile_source(source, "sizes", dict(_globals), label="sizes of a wrapper")
