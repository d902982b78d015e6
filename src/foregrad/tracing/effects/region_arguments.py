"""The arguments and results of an eager region, apart from the tensors in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import UnsupportedSideEffectError
from ...frontend.expected import is_plain
from ...frontend.tree import Tree, check_leaves, flatten

__all__ = ["Arguments", "rebuilt", "take_apart"]

_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LASTING = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.nn.Module, type)


class Arguments:
    """Arguments with their tensors taken out: `tensors`, in order. `is_old(object)`: it is older than the call, so that
    each call finds it again; such a container without tensors stays the object that it is.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_old: Callable[[Any], bool]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.is_old = is_old
        self.new: Any = None  # an object that is not
        self._build = self._opened((args, kwargs))

    def build(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors."""
        args, kwargs = self._build(iter(tensors))
        return args, kwargs

    def _opened(self, value: Any) -> Callable[[Iterator[torch.Tensor]], Any]:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return next
        if isinstance(value, _SYMBOLIC):
            number = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](value)
            return lambda _: number
        leaves, tree = flatten(value)
        if tree.kind == "leaf":
            if not (is_plain(value) or isinstance(value, _LASTING) or self.is_old(value)):
                self.new = value
            return lambda _: value
        if self.is_old(value) and not any(isinstance(leaf, (torch.Tensor, *_SYMBOLIC)) for leaf in leaves):
            return lambda _: value
        parts = [self._opened(leaf) for leaf in leaves]
        return lambda tensors: tree.unflatten([part(tensors) for part in parts])


@dataclasses.dataclass(frozen=True, slots=True)
class _At:
    """In the place of a leaf: the argument or value that it is. `number`: it is that number."""

    argument: bool
    index: int
    number: type | None = None


def take_apart(result: Any, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[Tree, list[Any]]]:
    """The tensors among the leaves of a result, and the rest. Numbers, which may be others next time, are tensors."""
    leaves, tree = flatten(result)
    check_leaves(leaves, tree.paths("result"), "the eager region's")
    arguments = {id(tensor): index for index, tensor in enumerate(given)}
    known: dict[int, int] = {}
    values: list[torch.Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if type(leaf) in _NUMBERS:
            rest.append(_At(False, len(values), type(leaf)))
            values.append(torch.tensor(leaf, dtype=_NUMBERS[type(leaf)], device="cpu"))
        elif not isinstance(leaf, torch.Tensor):
            rest.append(leaf)
        elif id(leaf) in arguments:
            rest.append(_At(True, arguments[id(leaf)]))
        else:
            if leaf.layout is not torch.strided or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                raise UnsupportedSideEffectError(
                    f"an eager region returns a {type(leaf).__name__} of layout {leaf.layout}. Return dense tensors: "
                    "call .to_dense() in the region."
                )
            if id(leaf) not in known:
                known[id(leaf)] = len(values)
                values.append(leaf)
            rest.append(_At(False, known[id(leaf)]))
    return values, (tree, rest)


def rebuilt(rest: tuple[Tree, list[Any]], arguments: Sequence[Any], values: Sequence[Any]) -> Any:
    """A result with these arguments and values in it."""
    tree, leaves = rest
    return tree.unflatten([_leaf(leaf, arguments, values) for leaf in leaves])


def _leaf(leaf: Any, arguments: Sequence[Any], values: Sequence[Any]) -> Any:
    if not isinstance(leaf, _At):
        return leaf
    value = (arguments if leaf.argument else values)[leaf.index]
    return value if leaf.number is None else value.item()
