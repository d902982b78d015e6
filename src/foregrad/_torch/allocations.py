"""Allocations of a call on the CPU, as the allocator reports them. Checked on torch 2.13.0.

The reports go to a profiler of the thread. The call runs on a thread of its own, which has no modes, no autocast and
no profiler: a profile that the user takes meanwhile neither sees the call nor is disturbed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["peak_bytes"]


def peak_bytes(make_call: Callable[[], Callable[[], Any]]) -> int | None:
    """The most bytes in use at once while a call runs, beyond those in use before; None if the call fails.

    `make_call` makes the call's operands, on the same thread.
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


def _peak(call: Callable[[], Any]) -> int:
    torch.get_num_threads()  # gives this thread the number that the process has
    options = (False, True, False, False, False, torch._C._profiler._ExperimentalConfig())
    config = torch.autograd.ProfilerConfig(torch.autograd.ProfilerState.CPU, *options)  # type: ignore[attr-defined]
    torch.autograd._enable_profiler_legacy(config)  # type: ignore[attr-defined]
    try:
        kept = call()
    finally:
        records = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
    del kept
    in_use = peak = 0
    for events in records:
        event: Any
        for event in events:
            if event.kind() == "memory_alloc":
                in_use += event.cpu_memory_usage()
                peak = max(peak, in_use)
    return peak
