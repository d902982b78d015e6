"""Calling a backward that overwrites what it is given.

The forward made those tensors for it alone, and still others may have them: the graph when it is kept, a hook on saved
tensors, whoever looked into the node, another thread. A backward that overwrites nothing takes its place then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch import memory
from .compiled import Boxed

__all__ = ["overwriting", "owned_among"]


def owned_among(positions: tuple[int, ...], values: list[Any]) -> tuple[int, ...]:
    """Positions whose buffer in `values` has no other owner.

    What isn't in the first call may never be: the graph is kept each time, or the forward returns what it keeps itself.
    """
    owned = memory.owned()
    return tuple(position for position in positions if owned(values, (position,)))


def overwriting(backward: Boxed, positions: tuple[int, ...], make_careful: Callable[[], Boxed]) -> Boxed:
    """`backward`, which writes into its inputs at `positions`, where they are nobody else's; or the careful one."""
    owned = memory.owned()

    def choose(values: list[Any]) -> list[Any]:
        if owned(values, positions):
            return backward(values)
        return make_careful()(values)

    return choose
