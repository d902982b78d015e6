"""Storages that a function takes of tensors, and hands to `set_`: there they are those tensors, by strides."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["Storages"]


class Storages:
    """`owners`: a tensor in each storage that was asked for, by its address."""

    def __init__(self) -> None:
        self.owners: dict[int, torch.Tensor] = {}

    def asked(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self.owners.setdefault(storage._cdata, tensor)

    def as_tensor(
        self, target: torch.Tensor, source: Any = None, storage_offset: Any = 0, size: Any = (), stride: Any = ()
    ) -> torch.Tensor | None:
        """What `target.set_(...)` is given, as a tensor; None where that is one, or is not known as one."""
        if target.requires_grad and torch.is_grad_enabled():
            return None
        if source is None:
            return torch.empty(0, dtype=target.dtype, device=target.device)
        storage = getattr(source, "_untyped_storage", source)
        owner = self.owners.get(storage._cdata) if isinstance(storage, torch.UntypedStorage) else None
        if owner is None or owner.dtype is not target.dtype or owner.device != target.device:
            return None
        if not size:
            size = (storage.nbytes() // target.element_size(),)
        with torch.no_grad():
            return owner.detach().as_strided(size, stride or _contiguous(size), storage_offset)


def _contiguous(size: Any) -> tuple[int, ...]:
    return tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
