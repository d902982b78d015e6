"""No garbage collection while a graph is built: everything made is kept, so there is nothing to find.

A capture allocates hundreds of thousands of small objects. Each few hundred of them make the collector walk the young
ones, and now and then everything that the process has imported: a third of the time for a large graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused_collection"]


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Context: the collector is off, and as it was afterwards. For the whole process, but nothing else notices."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
