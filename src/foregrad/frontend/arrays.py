"""NumPy arrays among the arguments of a call: tensors over their memory are what the graph takes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .tree import Tree

_KEYED = ("tuple", "list", "namedtuple")
_from_numpy: Callable[[Any], torch.Tensor] = torch.from_numpy  # as it is outside of captures


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, of no subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def tensor_over(value: Any) -> torch.Tensor | None:
    """The tensor over the memory of an array; None for anything else, and for an array that no tensor can be over."""
    if not is_array(value) or value.dtype.kind not in "biufc":
        return None
    if not value.flags.writeable:  # of which PyTorch warns
        return None
    try:
        return _from_numpy(value)
    except (TypeError, ValueError):  # the order of bytes, negative strides, numbers of 80 bits
        return None


def arrays_in(tree: Tree, first: int = 0) -> Iterator[tuple[int, int, tuple[Any, ...] | None]]:
    """The arrays in a structure: the numbers of the leaf and of the container, and the keys that lead there, where it
    takes only those.

    `first`: the number of the first leaf of all.
    """
    if tree.kind == "array":
        yield first, tree.number, ()
        return
    keys: Sequence[Any] = range(len(tree.children)) if tree.kind in _KEYED else ()
    keys = tree.context if tree.kind == "dict" else keys
    for at, child in enumerate(tree.children):
        for leaf, number, way in arrays_in(child, first):
            yield leaf, number, None if way is None or not keys else (keys[at], *way)
        first += child.size


def are_apart(arrays: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of none of these tensors over arrays overlaps with that of another, or of `others`.

    Tensors over one array, or over views of it, do not know of one another.
    """
    ends = sorted((start, end) for start, end in map(_extent, arrays) if start < end)
    if any(before[1] > after[0] for before, after in itertools.pairwise(ends)):
        return False
    return not any(start < b and a < end for a, b in map(_extent, others) for start, end in ends)


def overlaps(value: Any, others: Iterable[Any]) -> bool:
    """Whether a value is an array with memory that may be that of one of the others, of its class."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return any(numpy.may_share_memory(value, other) for other in others)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()
