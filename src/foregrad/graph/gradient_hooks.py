"""Hooks of the user's on gradients that no graph can hold, and the operator that calls them in a backward.

`foregrad::gradient_hook` gives the hook a copy of the gradient, and gives back a copy of what comes of it: whatever
the hook keeps is in memory that no compiler uses again.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CALL", "GradientHook"]


@dataclasses.dataclass(eq=False)
class GradientHook:
    """One hook that a call registers, `name`d for messages; `where`: the user's line. Graphs know it by its key."""

    hook: Callable[[torch.Tensor], Any]
    name: str
    where: str
    key: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    def __post_init__(self) -> None:
        _hooks[self.key] = self


_hooks: weakref.WeakValueDictionary[int, GradientHook] = weakref.WeakValueDictionary()

_library = torch.library.Library("foregrad", "FRAGMENT")
_library.define(
    "gradient_hook(int hook, Tensor gradient) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_operators: Any = torch.ops.foregrad
CALL = _operators.gradient_hook.default


def _call(hook: int, gradient: torch.Tensor) -> torch.Tensor:
    called, given = _hooks[hook], gradient.clone()
    result = called.hook(given)
    if result is None:
        result = given
    elif not isinstance(result, torch.Tensor):
        raise TypeError(f"the hook `{called.name}` returned a {type(result).__name__}, where a gradient is expected")
    looks = [(t.shape, t.dtype, t.device, t.layout) for t in (result, given)]
    if looks[0] != looks[1]:
        raise RuntimeError(
            f"the hook `{called.name}` has changed the size or type of the gradient: it got {looks[1]} and returned "
            f"{looks[0]}"
        )
    return torch.empty_like(given).copy_(result)


def _fake(hook: int, gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient.clone())


_library.impl("gradient_hook", _call, "CompositeExplicitAutograd")
torch.library.register_fake("foregrad::gradient_hook", _fake, lib=_library)
torch.fx.node.has_side_effect(CALL)
