"""Writes whose result depends on the order in which a kernel goes: done by that kernel, on a copy of the memory.

A tensor may have several elements in one place (as `unfold` gives), or overlap another one that the operator reads or
writes too. What such a write leaves is what the kernel leaves, whichever it wrote last: no functional operator says
so. It becomes one node, a `CallInMemory`, that copies the memory, lays the tensors on the copy as they lay on the
original, and runs the operator there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .._torch.dispatch import plain_execution
from ..graph.meta import TensorSpec
from .opinfo import OpInfo

if TYPE_CHECKING:
    from .alias import Value

__all__ = [
    "At",
    "CallInMemory",
    "Place",
    "draws_in_memory_order",
    "place_of",
    "rounds_in_memory",
    "tensors_at",
    "where_order_matters",
]

aten = torch.ops.aten

At = tuple[int, int | None]  # an argument by position, and for a list of tensors by index

_EXACT_UP_TO_BYTES = 1 << 22
# Each element of the result is computed from those at its own place alone, though PyTorch does not tag them so.
_POINTWISE = {aten.copy_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: in which of the memories, its layout, and how many bytes from the memory's start."""

    memory: int
    spec: TensorSpec
    start: int

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor there; `memory` is flat."""
        spec = self.spec
        itemsize = spec.dtype.itemsize
        if spec.dtype is not memory.dtype:
            unit = max(itemsize, memory.itemsize)
            whole = memory.numel() * memory.itemsize // unit * unit
            memory = memory[: whole // memory.itemsize].view(spec.dtype)
        return _with_bits(memory.as_strided(spec.shape, spec.stride, self.start // itemsize), spec)


def place_of(value: Value, memory: int) -> Place | None:
    """Where `value` lies in what its root spans; None where it goes past that, or where sizes vary."""
    spec, root = value.spec, value.root.spec
    if not (spec.is_static and root.is_static):
        return None
    start = spec.offset * spec.dtype.itemsize - root.offset * root.dtype.itemsize
    if start < 0 or start + spec.nbytes > root.nbytes or start % spec.dtype.itemsize:
        return None
    return Place(memory, spec, start)


class CallInMemory:
    """`op` run on copies of memories: `call(*memories, *arguments)` -> (results that `op` made, the memories after it).

    `memories`: what the first arguments look like; they come back laid out so. `places`: the arguments of `op`, by
    position in its schema and index in a list, that lie in one of them; None is given for those.
    """

    def __init__(self, op: Any, memories: tuple[TensorSpec, ...], places: dict[At, Place]) -> None:
        self.op = op
        self.memories = memories
        self.places = places
        self.tags = op.tags
        self.__name__ = "call_in_memory_" + op.__name__.replace(".", "_")
        self.__qualname__ = self.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        count = len(self.memories)
        copies = [_copied(tensor, spec) for tensor, spec in zip(args[:count], self.memories, strict=True)]
        flat = [_flat(copy, spec) for copy, spec in zip(copies, self.memories, strict=True)]
        given = [list(value) if isinstance(value, (list, tuple)) else value for value in args[count:]]
        laid = []
        for (position, index), place in self.places.items():
            tensor = place.on(flat[place.memory])
            laid.append(tensor)
            if index is None:
                given[position] = tensor
            else:
                given[position][index] = tensor
        arguments = self.op._schema.arguments
        plain = [value for value, argument in zip(given, arguments, strict=False) if not argument.kwarg_only]
        keywords = {a.name: value for value, a in zip(given, arguments, strict=False) if a.kwarg_only}
        result = self.op(*plain, **keywords)
        results = () if result is None else result if isinstance(result, (tuple, list)) else (result,)
        made = [value for value in results if not any(value is tensor for tensor in laid)]
        return (*made, *(_with_bits(copy, spec) for copy, spec in zip(copies, self.memories, strict=True)))

    def __repr__(self) -> str:
        places = ", ".join(
            f"{position if index is None else (position, index)}: {place.spec} strides {place.spec.stride} of memory "
            f"{place.memory} from byte {place.start}"
            for (position, index), place in self.places.items()
        )
        return f"call_in_memory({self.op}, {places})"


def _copied(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A copy of a tensor and of what lies between its elements, without its bits."""
    tensor = _with_bits(tensor, spec)
    copy = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    if tensor.stride() == spec.stride:
        _flat(copy, spec).copy_(_flat(tensor, spec))
    else:
        copy.copy_(tensor)
    return copy


def _flat(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The memory that a tensor spans."""
    return tensor.as_strided((spec.nbytes // spec.dtype.itemsize,), (1,))


def _with_bits(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """With the conjugate and negative bits of `spec`; applied again, without them."""
    if spec.conj:
        tensor = aten._conj.default(tensor)
    if spec.neg:
        tensor = aten._neg_view.default(tensor)
    return tensor.detach() if spec.conj or spec.neg else tensor


# ------------------------------------------------------------------------------------------------ when it is needed


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
