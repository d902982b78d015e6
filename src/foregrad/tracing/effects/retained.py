"""`retain_grad()` on what a function returns or is given: the compiled call does it again, on the real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import UnsupportedSideEffectError

__all__ = ["check_watched_inside", "retained_by"]

_INTERIOR = "computes other results from it, whose gradients flow to it inside"


def retained_by(
    tensors: Sequence[torch.Tensor],
    results: Sequence[Any],
    by_stand_in: Mapping[int, Any],
    number: Mapping[int, int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions among the results of those of the tensors that keep their gradient, and the inputs that do."""
    if not tensors:
        return (), ()
    kept = set(map(id, tensors))
    records = [by_stand_in[i] for i in kept if i in by_stand_in]
    inputs = sorted(number[id(r)] for r in records if r.real.requires_grad and not r.real.is_leaf)
    positions = [i for i, result in enumerate(results) if id(result) in kept and id(result) not in by_stand_in]
    return tuple(positions), tuple(inputs)


def check_watched_inside(name: str, paths: Sequence[str], positions: Sequence[int], hooked: Sequence[int]) -> None:
    """Raise where the gradient of a result flows inside the function: nobody outside sees it whole."""
    if not positions:
        return
    why = "has hooks that compute with its own tensors" if set(positions) <= set(hooked) else _INTERIOR
    raise UnsupportedSideEffectError(
        f"`{name}` calls `retain_grad()` on {', '.join(paths[i] for i in positions)}, which it returns, and {why}. "
        "Compile what comes before it and what comes after it as two functions, or take the gradient by it with "
        "torch.autograd.grad inside the function."
    )
