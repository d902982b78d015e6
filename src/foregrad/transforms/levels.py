"""Transforms of torch.func in a capture: their tensors become stand-ins, and no level outlives the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch.patches import swapped
from ..locks import Bind
from ..tracing.aspect import Aspect, Context, aspect
from ._torch import install, levels_put_back


@aspect
class TransformLevels(Aspect):
    """The levels that a function enters: a transform's tensors are stand-ins, and an exception leaves no level."""

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        install(bind, swapped)

    def around_function(self) -> Context:
        return levels_put_back()
