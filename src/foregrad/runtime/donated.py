"""Calls of a backward that overwrites its donated inputs.

The forward made those tensors for the backward alone, and yet other owners are possible: a retained graph, a hook on
saved tensors, a reader of the node's attributes, another thread. Then a backward that overwrites nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch import memory
from .compiled import Boxed

__all__ = ["overwriting", "owned_among"]


def owned_among(positions: tuple[int, ...], values: list[Any]) -> tuple[int, ...]:
    """Positions whose buffer in `values` has no other owner.

    Checked in the first call only: a buffer with another owner there has one as a rule, since the graph is retained in
    each call, or the forward returns a tensor that it keeps.
    """
    owned = memory.owned()
    return tuple(position for position in positions if owned(values, (position,)))


def overwriting(backward: Boxed, positions: tuple[int, ...], make_careful: Callable[[], Boxed]) -> Boxed:
    """`backward`, which writes into its inputs at `positions`, if they have no other owner; else the careful one."""
    owned = memory.owned()

    def choose(values: list[Any]) -> list[Any]:
        if owned(values, positions):
            return backward(values)
        return make_careful()(values)

    return choose
