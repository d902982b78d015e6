"""Which inputs of a specialization share memory, where some of that is written: a call must have the same relations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .._torch.tensors import share_counters, storage_key
from ..errors import ArtifactError
from ..graph.signature import BaseOf, MemoryOf, Signature
from ..serialize.values import checked

__all__ = ["Sharing", "same_memories", "sharing_from", "sharing_of", "sharing_to"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sharing:
    """`memories`: for each input the number of the memory that it lies in, None for one that is a whole memory.

    `counters`: pairs of inputs in one memory, and whether a write to one counts as a write to the other. `roots`:
    inputs that must be views of nothing.
    """

    memories: tuple[int | None, ...]
    counters: tuple[tuple[int, int, bool], ...] = ()
    roots: tuple[int, ...] = ()


def sharing_of(signature: Signature, tensors: Sequence[torch.Tensor | None]) -> Sharing | None:
    """The relations of the tensors that were captured; None where no two share memory."""
    numbers: dict[int, int] = {}
    memories: list[int | None] = []
    members: dict[int, list[int]] = {}
    counters = []
    for i, (info, tensor) in enumerate(zip(signature.inputs, tensors, strict=True)):
        if isinstance(info.source, MemoryOf) or tensor is None:
            memories.append(None)
            continue
        number = numbers.setdefault(storage_key(tensor), len(numbers))
        memories.append(number)
        for j in members.setdefault(number, []):
            other = tensors[j]
            assert other is not None
            if not (tensor.is_inference() or other.is_inference() or _base(tensor) is _base(other)):
                counters.append((j, i, share_counters(other, tensor)))
                break
        members[number].append(i)
    if all(len(group) == 1 for group in members.values()):
        return None
    based = {info.source.input for info in signature.inputs if isinstance(info.source, BaseOf)}
    grouped = {i for _, group in signature.shared_memory for i in group} - based
    roots = tuple(i for i in sorted(grouped) if (t := tensors[i]) is not None and t._base is None)
    return Sharing(tuple(memories), tuple(counters), roots)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def same_memories(memories: tuple[int | None, ...], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors lie in memories as these numbers say; those without a number are left out."""
    known: dict[int, int] = {}
    numbers = []
    for number, tensor in zip(memories, tensors, strict=True):
        numbers.append(None if number is None else known.setdefault(storage_key(tensor), len(known)))
    return tuple(numbers) == memories


def sharing_to(sharing: Sharing | None) -> Any:
    """As data."""
    if sharing is None:
        return None
    return {
        "memories": list(sharing.memories),
        "counters": [list(pair) for pair in sharing.counters],
        "roots": list(sharing.roots),
    }


def sharing_from(data: Any, signature: Signature) -> Sharing | None:
    """What `sharing_to` made data of."""
    count = len(signature.inputs)
    if data is None:
        return None
    memories = tuple(None if n is None else checked(n, int) for n in checked(data["memories"], list))
    counters = tuple((checked(i, int), checked(j, int), checked(same, bool)) for i, j, same in data["counters"])
    roots = tuple(checked(i, int) for i in checked(data["roots"], list))
    if len(memories) != count or not all(0 <= n < count for n in memories if n is not None):
        raise ArtifactError("memories of other inputs than there are")
    if not all(0 <= i < count for i in (*roots, *(i for pair in counters for i in pair[:2]))):
        raise ArtifactError("relations of inputs that are not there")
    return Sharing(memories, counters, roots)
