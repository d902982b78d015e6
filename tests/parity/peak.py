"""What a step's memory is, as the allocator reports it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

__all__ = ["peak_of"]


def peak_of(step: Callable[[], object]) -> int:
    """Bytes that a step on the CPU has in use at once, beyond what was in use before it."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
