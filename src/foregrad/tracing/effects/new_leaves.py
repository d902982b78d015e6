"""Leaves that a function makes and returns, and computes other results from: their gradient would stay inside."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..._torch.tensors import base_of, history_of, is_view
from ...errors import UnsupportedSideEffectError
from ...graph.signature import OutputInfo
from ..tape.gradient_paths import other_leaves

__all__ = ["check_new_leaves"]


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
