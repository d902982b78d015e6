"""Results whose gradients are looked at: those that keep theirs, and leaves that the function makes.

`retain_grad()` on a result or an input is done again by the compiled call. What other results are computed from inside,
or from a leaf made there, would get no gradient, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..._torch.tensors import base_of, history_of, is_view
from ...errors import UnsupportedSideEffectError
from ...graph.signature import OutputInfo
from ..tape.gradient_paths import other_leaves

__all__ = ["check_new_leaves", "check_watched_inside", "retained_by"]

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


def check_new_leaves(
    name: str,
    results: Sequence[Any],
    infos: Sequence[OutputInfo],
    known: Collection[int],
    fakes: Sequence[torch.Tensor | None],
    wrappers: Sequence[Any],
) -> None:
    """No output of the graph (`fakes`) was computed from a leaf that the function made and gives back, or leaves in
    Python's state. `known`: ids of results that are inputs. `wrappers`: results that are wrapper subclasses.
    """
    made = {
        id(result): info.path
        for result, info in zip(results, infos, strict=True)
        if isinstance(result, torch.Tensor) and id(result) not in known and _is_leaf(result)
    }
    made |= {id(one): f"a {type(one).__qualname__}" for one in wrappers if id(one) not in known and _is_leaf(one)}
    if not made:
        return
    outputs = [fake for fake in fakes if fake is not None and history_of(fake) is not None]
    for leaf in other_leaves(outputs, ()):
        if id(leaf) in made:
            raise UnsupportedSideEffectError(
                f"`{name}` makes the leaf {made[id(leaf)]} and computes other results from it: a compiled call would "
                "not give it their gradient. Make the leaf outside, or compile what computes with it by itself."
            )


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether it was marked by itself. A view is not asked: that may give it another history, or raise."""
    base = base_of(tensor) if is_view(tensor) else None
    return tensor.requires_grad and (tensor.is_leaf if base is None else not base.requires_grad)
