"""Results as Python objects: which are parameters, and what attributes the function set on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ...errors import UnsupportedSideEffectError
from ...frontend.tree import flatten

__all__ = ["attributes_set", "parameters_made"]


def parameters_made(results: Sequence[Any], known: Collection[int]) -> tuple[int, ...]:
    """Positions of the results that are parameters which the function made; `known`: ids of results that are inputs."""
    return tuple(at for at, t in _made(results, known) if type(t) is torch.nn.Parameter)


def attributes_set(
    name: str, results: Sequence[Any], paths: Sequence[str], known: Collection[int]
) -> tuple[tuple[int, str, Any], ...]:
    """(position among the results, name, value) of each attribute that the function set on a result which it made."""
    found = [(at, key, value) for at, t in _made(results, known) for key, value in t.__dict__.items()]
    for at, key, value in found:
        if any(isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat)) for leaf in flatten(value)[0]):
            raise UnsupportedSideEffectError(
                f"`{name}` sets the attribute {key} of {paths[at]}, which it returns, to a tensor; a compiled call "
                "would not. Return that tensor as well."
            )
    return tuple(found)


def _made(results: Sequence[Any], known: Collection[int]) -> list[tuple[int, torch.Tensor]]:
    first = {id(t): (at, t) for at, t in reversed(list(enumerate(results))) if is_stand_in(t)}
    return [pair for key, pair in first.items() if key not in known]
