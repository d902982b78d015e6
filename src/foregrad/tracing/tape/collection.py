"""No garbage collection while a graph is built: everything made is kept, so there is nothing to find.

A capture allocates hundreds of thousands of small objects. Each few hundred of them make the collector walk the young
ones, and now and then everything that the process has imported: a third of the time for a large graph.
"""

from __future__ import annotations

import gc

from ...locks import InPlace

__all__ = ["paused_collection"]


_before: list[bool] = []


def _pause() -> None:
    _before[:] = [gc.isenabled()]
    gc.disable()


def _go_on() -> None:
    if _before[0]:
        gc.enable()


_paused = InPlace(_pause, _go_on)


def paused_collection() -> InPlace:
    """Context: the collector is off, and as it was afterwards. For the whole process, but nothing else notices."""
    return _paused
