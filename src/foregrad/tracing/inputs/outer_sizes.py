"""Sizes of wrappers among the inputs: which follow from sizes of their plain tensors that vary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..._torch.jagged import is_jagged
from ..._torch.symbols import concrete, is_symbolic
from ...subclasses.sizes import outer_sizes
from ...subclasses.spec import WrapperSpec
from ..tape.symbols import following_strides

__all__ = ["with_sizes_of"]


def with_sizes_of(spec: WrapperSpec, parts: Sequence[Any]) -> WrapperSpec:
    """`spec` for a wrapper around plain stand-ins, some of whose sizes vary.

    A size of the wrapper is taken to be the one of a plain tensor that it is equal to: guards look at each call.
    """
    parts = parts[: len(spec.carries)]
    varying = [(dim, size) for part in parts for dim, size in enumerate(part.shape) if is_symbolic(size)]
    if not varying or is_jagged(spec.cls):  # its class computes its sizes
        return spec
    inner: list[WrapperSpec | None] = []
    first = 0
    for held in spec.inner:
        count = 1 if held is None else len(held.carries)
        inner.append(None if held is None else with_sizes_of(held, parts[first : first + count]))
        first += count
    shape = tuple(_same_size(size, dim, varying) for dim, size in enumerate(spec.shape))
    sizes = outer_sizes(spec.cls, shape, following_strides(spec, shape), parts)
    return dataclasses.replace(spec, sizes=sizes, inner=tuple(inner))


def _same_size(size: int, dim: int, varying: Sequence[tuple[int, Any]]) -> Any:
    equal = [(other_dim != dim, other) for other_dim, other in varying if concrete(other) == size]
    return min(equal, key=lambda pair: pair[0])[1] if equal else size
