"""Leaves that a function makes and returns, and computes other results from: their gradient would stay inside."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..._torch.tensors import base_of, history_of, is_view
from ...errors import UnsupportedSideEffectError
from ...graph.signature import GraphOutput, OutputInfo
from ..tape.gradient_paths import other_leaves

__all__ = ["new_leaves"]


def new_leaves(
    name: str,
    results: Sequence[Any],
    infos: Sequence[OutputInfo],
    known: Collection[int],
    fakes: Sequence[torch.Tensor | None],
    interior: Collection[int],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(the graph output that is such a leaf, the graph outputs that lead to it).

    `known`: ids of results that are inputs. `fakes`: those of graph outputs. `interior`: graph outputs that others were
    computed from.
    """
    made = {
        id(result): info
        for result, info in zip(results, infos, strict=True)
        if isinstance(result, torch.Tensor) and id(result) not in known and _is_leaf(result)
    }
    found: dict[int, list[int]] = {}
    for number, fake in enumerate(fakes if made else ()):
        if fake is None or history_of(fake) is None:
            continue
        for leaf in other_leaves([fake], ()):
            info = made.get(id(leaf))
            if info is None:
                continue
            if not isinstance(info, GraphOutput) or number in interior:
                raise UnsupportedSideEffectError(
                    f"`{name}` makes the leaf that it returns as {info.path}, and computes other results from it. Make "
                    "the leaf outside, and compile what computes with it as a function of its own."
                )
            found.setdefault(info.output, []).append(number)
    return tuple((leaf, tuple(numbers)) for leaf, numbers in found.items())


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether it was marked by itself. A view is not asked: that may give it another history, or raise."""
    base = base_of(tensor) if is_view(tensor) else None
    return tensor.requires_grad and (tensor.is_leaf if base is None else not base.requires_grad)
