"""Whether what a write leaves depends on the order in which its kernel goes: see `memory`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from ..._torch.dispatch import plain_execution
from ...graph.meta import TensorSpec
from ..tape.opinfo import OpInfo
from .alias import Value
from .aliased_kernels import At

__all__ = ["draws_in_memory_order", "rounds_in_memory", "tensors_at", "where_order_matters"]

aten = torch.ops.aten

_EXACT_UP_TO_BYTES = 1 << 22
# Each element of the result is computed from those at its own place alone, though PyTorch does not tag them so.
_POINTWISE = {aten.copy_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor}


def tensors_at(given: dict[int, Any]) -> dict[At, torch.Tensor]:
    """The tensors among arguments, and in lists of them, by where they are."""
    found: dict[At, torch.Tensor] = {}
    for position, value in given.items():
        if isinstance(value, torch.Tensor):
            found[position, None] = value
        elif isinstance(value, (list, tuple)):
            found.update({(position, i): item for i, item in enumerate(value) if isinstance(item, torch.Tensor)})
    return found


def where_order_matters(info: OpInfo, values: dict[At, Value]) -> bool:
    """Whether some element that the operator writes is written twice, or read for another one."""
    by_storage: dict[int, list[At]] = {}
    for at, value in values.items():
        if at[0] in info.writes:
            if value.spec.overlaps_itself:
                return True
            by_storage[id(value.storage)] = []
    if len(values) == 1:
        return False
    for at, value in values.items():
        group = by_storage.get(id(value.storage)) if value.parent is not None or value._storage is not None else None
        if group is not None:
            group.append(at)
    return any(len(group) > 1 and _order_matters_among(info, values, group) for group in by_storage.values())


def _order_matters_among(info: OpInfo, values: dict[At, Value], group: list[At]) -> bool:
    if _are_apart([values[at].spec for at in group]):
        return False
    for at in group:
        if at[0] not in info.writes:
            continue
        for other in group:
            if other == at or (other[0] in info.writes and other < at):
                continue
            one, two = values[at].spec, values[other].spec
            if one == two and at[1] == other[1] and other[0] not in info.writes and _is_pointwise(info):
                continue
            if _overlap(one, two):
                return True
    return False


def _is_pointwise(info: OpInfo) -> bool:
    op = info.op
    return op in _POINTWISE or torch.Tag.pointwise in op.tags or op._schema.name.startswith("aten::_foreach_")


def _are_apart(specs: Iterable[TensorSpec]) -> bool:
    """Whether each tensor ends where the next one starts, or before."""
    ranges = [(spec.offset * spec.dtype.itemsize, spec.nbytes) for spec in specs]
    if len(ranges) == 2:  # sizes that vary are compared as seldom as can be
        (a, m), (b, n) = ranges
        return bool(a + m <= b) or bool(b + n <= a)
    ranges.sort()
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ranges))


def _overlap(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors in one memory have some byte in common; True where that would take long to find out."""
    if a.numel == 0 or b.numel == 0 or _are_apart([a, b]):
        return False
    if not (a.is_static and b.is_static):
        return True
    starts = [spec.offset * spec.dtype.itemsize for spec in (a, b)]
    first = min(starts)
    size = max(start + spec.nbytes for start, spec in zip(starts, (a, b), strict=True)) - first
    if size > _EXACT_UP_TO_BYTES:
        return True
    with plain_execution():
        taken = torch.zeros(size, dtype=torch.bool)
        _bytes_of(a, taken, starts[0] - first).fill_(True)
        return bool(_bytes_of(b, taken, starts[1] - first).any())


def _bytes_of(spec: TensorSpec, memory: torch.Tensor, start: int) -> torch.Tensor:
    itemsize = spec.dtype.itemsize
    return memory.as_strided((*spec.shape, itemsize), (*(s * itemsize for s in spec.stride), 1), start)


def draws_in_memory_order(func: Any, targets: list[torch.Tensor]) -> bool:
    """Whether the functional form would give other numbers: its result is contiguous, this tensor is not."""
    return func in (aten.bernoulli_.float, aten.bernoulli_.Tensor) and not targets[0].is_contiguous()


# Complex products are compiled twice, for operands in memories of their own and for others, and round differently.
_PRODUCTS = {"mul_", "div_", "addcmul_", "addcdiv_", "addr_", "lerp_", "pow_", "square_", "reciprocal_"}


def rounds_in_memory(func: Any, targets: list[torch.Tensor]) -> bool:
    """Whether the functional form would round differently."""
    return targets[0].is_complex() and func._schema.name.removeprefix("aten::") in _PRODUCTS
