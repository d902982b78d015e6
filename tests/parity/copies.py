"""Separate but equal copies of example arguments: same strides, shared storages, views, leaves, same objects."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.parity.observe import has_storage


class Copier:
    """Copies trees of tensors. Tensors that share a storage share the copy's; the same object stays the same."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._flat: list[torch.Tensor] = []
        self._alive: list[Any] = []

    def __call__(self, tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self.tensor, tree)

    def tensor(self, source: torch.Tensor) -> torch.Tensor:
        if id(source) not in self._tensors:
            self._alive.append(source)
            self._tensors[id(source)] = self._copy(source)
        return self._tensors[id(source)]

    def _copy(self, source: torch.Tensor) -> torch.Tensor:
        if not has_storage(source) or source.is_meta or type(source) not in (torch.Tensor, torch.nn.Parameter):
            return source.detach().clone().requires_grad_(source.requires_grad)
        if source._is_view() and not (source.is_leaf and source.requires_grad):
            return source._view_func_unsafe(self.tensor(source._base))
        data = self._on_copied_storage(source)
        if source.is_conj():
            data = torch._conj(data)
        if source.is_neg():
            data = torch._neg_view(data)
        if isinstance(source, torch.nn.Parameter):
            return torch.nn.Parameter(data, source.requires_grad)
        if source.is_leaf:
            return data.detach().requires_grad_(source.requires_grad)
        return data.detach().requires_grad_().clone()

    def _on_copied_storage(self, source: torch.Tensor) -> torch.Tensor:
        storage = source.untyped_storage()
        if storage._cdata not in self._storages:
            copied = storage.clone()
            self._storages[storage._cdata] = copied
            if source.dtype.itemsize and not source.is_quantized and copied.nbytes() % source.dtype.itemsize == 0:
                self._flat.append(torch.empty(0, dtype=source.dtype).set_(copied))
        place = (source.storage_offset(), source.size(), source.stride())
        return torch.empty(0, dtype=source.dtype).set_(self._storages[storage._cdata], *place)

    def change_values(self) -> None:
        """Other numbers with the old ones' structure: floats halved, whole numbers and booleans in reverse order.

        Halving is exact and keeps symmetry, definiteness and the order of elements; reversing keeps indices in
        range.
        """
        for flat in self._flat:
            if flat.dtype.itemsize == 1 and flat.is_floating_point():
                continue
            if flat.is_floating_point() or flat.is_complex():
                flat.mul_(0.5)
            else:
                flat.copy_(flat.flip(0))


def copy_of(tree: Any, *, other_values: bool = False) -> Any:
    """A copy of a tree of arguments, with its own or with other values."""
    copier = Copier()
    result = copier(tree)
    if other_values:
        with torch.no_grad():
            copier.change_values()
    return result
