"""Ownership of a tensor's memory, and the memory that a call allocates. Checked on torch 2.13.0.

Reference counts decide on ownership: Python's to the tensor and to its storage, PyTorch's to either.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .native import native

_autograd: Any = torch.autograd

Owned = Callable[[list[Any], tuple[int, ...]], bool]


def owned() -> Owned:
    """`owned()(values, positions)`: whether only the list `values` refers to the memory of its tensors there."""
    module = native()
    return owned_in_python if module is None else module.owned


def owned_in_python(values: list[Any], positions: Sequence[int]) -> bool:
    """The Python version of the C++ function."""
    alone = _alone()
    return all(_is_plain(values[i]) and _counts(values, i) == alone for i in positions)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own; a transform's wrapper or a sparse tensor has none."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory is PyTorch's. Memory that can't grow belongs to a library that counts no users."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.untyped_storage().resizable()


def _counts(values: list[Any], i: int) -> tuple[int, ...]:
    references = sys.getrefcount(values[i])
    storage = values[i].untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    return references, values[i]._use_count(), sys.getrefcount(storage), users


@functools.cache
def _alone() -> tuple[int, ...]:
    """The counts of a tensor that only a list holds. The query itself adds some, depending on the version."""
    return _counts([torch.empty(1)], 0)


# -------------------------------------------------------------------- allocations
# Allocations of a call on the CPU, as the allocator reports them. Checked on torch 2.13.0.
#
# The reports go to a profiler of the thread. The call runs on its own thread, without modes, autocast or profiler: a
# profile that the user takes meanwhile neither sees the call nor is disturbed.


def peak_bytes(make_call: Callable[[], Callable[[], object]]) -> int | None:
    """The most bytes in use at once while a call runs, beyond those in use before; None if the call fails.

    `make_call` makes the call's operands, on the calling thread.
    """
    peaks: list[int] = []

    def measure() -> None:
        try:
            with torch.no_grad():
                peaks.append(_peak(make_call()))
        except Exception:
            peaks.clear()

    thread = threading.Thread(target=measure, name="foregrad-allocations")
    thread.start()
    thread.join()
    return peaks[0] if peaks else None


def _peak(call: Callable[[], object]) -> int:
    torch.get_num_threads()  # gives this thread the number that the process has
    options = (False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
    _autograd._enable_profiler_legacy(_autograd.ProfilerConfig(_autograd.ProfilerState.CPU, *options))
    try:
        kept = call()
    finally:
        records = _autograd._disable_profiler_legacy()
    del kept
    in_use = peak = 0
    for events in records:
        event: Any
        for event in events:
            if event.kind() == "memory_alloc":
                in_use += event.cpu_memory_usage()
                peak = max(peak, in_use)
    return peak
