"""Effects of a function that a compiled call would not repeat: looked for after it has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch.tensors import is_usable
from ..errors import UnsupportedSideEffectError
from ..frontend.call import FlatCall
from ..frontend.tree import flatten
from .inputs import InputRecord

__all__ = ["check_containers", "check_generator", "check_gradients"]


def check_containers(call: FlatCall, args: Any, kwargs: Any, leaves: Sequence[Any], name: str) -> None:
    """Raise where a container among the arguments is not what it was."""
    after, tree = flatten((args, kwargs))
    if tree != call.tree or any(a is not b for a, b in zip(after, leaves, strict=True)):
        raise UnsupportedSideEffectError(
            f"`{name}` changed a container among its arguments (added, removed or replaced an item), which a "
            "compiled call would not repeat. Return the new values instead."
        )


def check_generator(before: torch.Tensor, name: str) -> None:
    """Nothing draws for real while capturing: a generator that moved was seeded by the function."""
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise UnsupportedSideEffectError(
            f"`{name}` seeds the random generator (torch.manual_seed or set_rng_state), which a compiled call "
            "would not repeat. Seed before the call instead."
        )


def check_gradients(records: Sequence[InputRecord], name: str) -> None:
    """Raise where the function wrote to `.grad` of an input."""
    for record in records:
        stand_in = record.stand_in
        grad = stand_in.grad if is_usable(stand_in) and stand_in.is_leaf else None
        if grad is not None:
            raise UnsupportedSideEffectError(
                f"`{name}` wrote to `.grad` of {record.slot}; use torch.autograd.grad, or do it outside."
            )
