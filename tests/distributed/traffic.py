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

# Bytes of an element, by what the profiler calls its dtype.
_SIZES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "int": 4, "long int": 8, "bool": 1}
_SIZES |= {"unsigned char": 1, "signed char": 1, "short int": 2}


def traffic(step: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """How many collectives of each kind, and how many bytes this rank hands to gloo in those of each kind."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step()
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    kind = ""
    for event in sorted(profiled.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("c10d::"):
            kind = event.name.removeprefix("c10d::").strip("_")
            kinds[kind] += 1
        elif event.name.startswith("gloo:"):  # what the one before it is made of
            shapes = zip(event.input_shapes, event.input_dtypes, strict=True)
            sizes[kind] += sum(math.prod(shape) * _SIZES[dtype] for shape, dtype in shapes)
    return kinds, sizes
