"""`Compiled`: the halves of a partitioned graph after their compilers, and how they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..graph.partitioned import Partitioned
from ..graph.tangents import BackwardCase

if TYPE_CHECKING:
    from ..tracing.derivatives.resumable_trace import Derivative

__all__ = ["AtHand", "Compiled", "Derived", "NeedsInputGrad", "Partial"]

Boxed = Callable[[list[Any]], list[Any]]
NeedsInputGrad = frozenset[int] | None
AtHand = Callable[[], tuple[Sequence[Any], Sequence[Any]]]  # saved values and tangents of a backward


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A backward for some of the tangents and gradients; `read` says of each saved value (sizes first) if it is."""

    backward: Boxed
    read: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """`forward` and `backward` take one list, which they empty, and return a list.

    `make_backward(values)` compiles the backward, on first use; what nobody else has of that call's values may be
    overwritten in calls to come, if nobody else has it then. `make_partial_backward(mask, needs_input_grad)` gives the
    backward for the case that only the tangents at True positions of `mask` came in, and only the gradients of the
    inputs in `needs_input_grad` are asked for (None: all): it takes only those tangents, and returns None for other
    gradients; not for a backward that has effects.
    `disable_autocast`: autocast was on when the graphs were captured, so their casts are in them.
    `needs_grad_mode`: the function turned gradients on by itself. `make_derived(case, at_hand)` captures and
    compiles the backward for a case as a function, with what it reads of values as it is in the call with these
    `at_hand`; None: not kept for that.
    `hooked`: the function puts hooks on its own tensors.
    `native`: calls may go through the C++ part, where it was built.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Derived:
    """The backward of a compiled function as a compiled function of its own.

    `conditions`: sympy expressions of symbolic sizes that it needs to be true and that the function did not check.
    """

    derivative: Derivative
    compiled: Compiled
    conditions: tuple[Any, ...] = ()
