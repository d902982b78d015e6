"""What a call keeps for its backward, measured from outside: the same way for eager and for a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["measure_saved_bytes"]


def measure_saved_bytes(call: Callable[[], object], *, owned: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that `call` saves for backward, those of `owned` tensors aside.

    Parameters and inputs belong to the caller and stay alive whatever is saved; name them in `owned`.
    A tensor saved twice, or with a view of it, counts once.
    """
    bytes_by_storage: dict[int, int] = {}
    kept: list[Tensor] = []  # holds the storages until all are counted, lest one address be used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    for tensor in owned:
        bytes_by_storage.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(bytes_by_storage.values())
