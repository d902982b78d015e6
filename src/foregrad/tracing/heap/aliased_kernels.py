"""Writes whose result depends on the order in which a kernel goes: done by that kernel, on a copy of the memory.

A tensor may have several elements in one place (as `unfold` gives), or overlap another one that the operator reads or
writes too. What such a write leaves is what the kernel leaves, whichever it wrote last: no functional operator says
so. It becomes one node, a `RunOnStorageCopies`, that copies the memory, lays the tensors on the copy as they lay on the
original, and runs the operator there.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from ...graph.meta import TensorSpec

aten = torch.ops.aten

At = tuple[int, int | None]  # an argument by position, and for a list of tensors by index


class _Value(Protocol):
    """Of a `Value` of the heap, what is asked for here."""

    @property
    def spec(self) -> TensorSpec: ...

    @property
    def root(self) -> _Value: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StorageExtent:
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


def extent_of(value: _Value, memory: int) -> StorageExtent | None:
    """Where `value` lies in what its root spans; None where it goes past that, or where sizes vary."""
    spec, root = value.spec, value.root.spec
    if not (spec.is_static and root.is_static):
        return None
    start = spec.offset * spec.dtype.itemsize - root.offset * root.dtype.itemsize
    if start < 0 or start + spec.nbytes > root.nbytes or start % spec.dtype.itemsize:
        return None
    return StorageExtent(memory, spec, start)


class RunOnStorageCopies:
    """`op` run on copies of memories: `call(*memories, *arguments)` -> (results that `op` made, the memories after it).

    `memories`: what the first arguments look like; they come back laid out so. `places`: the arguments of `op`, by
    position in its schema and index in a list, that lie in one of them; None is given for those.
    """

    def __init__(self, op: Any, memories: tuple[TensorSpec, ...], places: dict[At, StorageExtent]) -> None:
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
