"""Inputs of a graph that share memory, if some of it is written: a call must have the same relations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .._torch.tensors import share_counters, storage_key
from ..graph.signature import BaseOf, MemoryOf, Signature

__all__ = ["Sharing", "sharing_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sharing:
    """`memories`: for each input the number of its storage, None for an input that is a whole storage.

    `counters`: pairs of inputs in one storage, and whether they share a version counter. `roots`: inputs that must be
    no views.
    """

    memories: tuple[int | None, ...]
    counters: tuple[tuple[int, int, bool], ...] = ()
    roots: tuple[int, ...] = ()


def sharing_of(signature: Signature, tensors: Sequence[torch.Tensor | None]) -> Sharing | None:
    """The relations of the tensors of a capture; None if no two share memory."""
    numbers: dict[int, int] = {}
    memories: list[int | None] = []
    members: dict[int, list[int]] = {}
    counters = []
    for i, (info, tensor) in enumerate(zip(signature.inputs, tensors, strict=True)):
        if isinstance(info.source, MemoryOf) or info.number is not None or tensor is None:
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
