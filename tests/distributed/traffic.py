"""What a rank exchanges with others while something runs, as the profiler sees it in compiled functions too.

A dispatch mode (`CommDebugMode`) would make compiled functions run as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["traffic"]


def traffic(step: Callable[[], Any]) -> tuple[Counter[str], int]:
    """How many collectives of each kind, and how many elements this rank hands to gloo in them."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step()
    kinds: Counter[str] = Counter()
    elements = 0
    for event in profiled.events():
        if event.name.startswith("c10d::"):
            kinds[event.name.removeprefix("c10d::").strip("_")] += 1
        elif event.name.startswith("gloo:"):
            elements += sum(map(math.prod, event.input_shapes))
    return kinds, elements
