"""`Compiled`: the compiled halves of a partitioned graph, and their calling convention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._torch import memory
from ..config import Config
from ..graph.joint import Partitioned
from ..graph.tangents import BackwardCase

if TYPE_CHECKING:
    from ..tracing.derivatives.resumable_trace import Derivative

Boxed = Callable[[list[Any]], list[Any]]
NeedsInputGrad = frozenset[int] | None
AtHand = Callable[[], tuple[Sequence[Any], Sequence[Any]]]  # saved values and tangents of a backward


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A backward for some of the tangents and gradients; `read`: whether each residual (sizes first) is read."""

    backward: Boxed
    read: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """`forward` and `backward` empty their one list, and return a list.

    `make_backward(values)` compiles the backward, on first use; buffers without another owner in the first call may be
    overwritten in later calls, if they have no other owner then. `make_partial_backward(mask, needs_input_grad)` gives
    the backward that takes the tangents at True positions of `mask` alone, and returns the gradients of the inputs in
    `needs_input_grad` alone (None: all); not for a backward with effects. `disable_autocast`: autocast was on during
    the capture, so the casts are in the graphs. `needs_grad_mode`: the function turned gradients on by itself.
    `make_derived(case, at_hand)` captures and compiles the backward for a case as a function; decisions on values are
    taken with the values `at_hand`. None: nothing was kept for a derivative. `hooked`: the function puts hooks on its
    own tensors. `native`: calls may use the C++ part, if it was built. `path_limit`: the number of a derivative's
    graphs, for outcomes of its branches or kinds of incoming gradients.
    """

    partitioned: Partitioned
    forward: Boxed
    make_backward: Callable[..., Boxed]
    make_partial_backward: Callable[[tuple[bool, ...], NeedsInputGrad], Partial]
    disable_autocast: bool
    needs_grad_mode: bool = False
    make_derived: Callable[[BackwardCase, AtHand], Derived] | None = None
    native: bool = False
    hooked: bool = False
    path_limit: int = Config.path_limit


@dataclasses.dataclass(frozen=True, slots=True)
class Derived:
    """The backward of a compiled function as a compiled function of its own.

    `conditions`: sympy expressions of symbolic sizes that must be true and that the function did not check.
    """

    derivative: Derivative
    compiled: Compiled
    conditions: tuple[Any, ...] = ()


# -------------------------------------------------------------------- donated inputs
# Calls of a backward that overwrites its donated inputs.
#
# The forward made those tensors for the backward alone, and yet other owners are possible: a retained graph, a hook on
# saved tensors, a reader of the node's attributes, another thread. In these cases a backward that overwrites nothing is
# called.


def owned_among(positions: tuple[int, ...], values: list[object]) -> tuple[int, ...]:
    """Positions of buffers in `values` without another owner.

    Checked in the first call only: a buffer with another owner has one in later calls too, as a rule: the graph is
    retained in each call, or the forward returns a tensor that it keeps.
    """
    owned = memory.owned()
    return tuple(position for position in positions if owned(values, (position,)))


def overwriting(backward: Boxed, positions: tuple[int, ...], make_careful: Callable[[], Boxed]) -> Boxed:
    """`backward`, which writes into its inputs at `positions`, if nobody else owns them; else the careful backward."""
    owned = memory.owned()

    def choose(values: list[object]) -> list[object]:
        if owned(values, positions):
            return backward(values)
        return make_careful()(values)

    return choose
