"""Python that graphs call: hooks on gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import UnsupportedSideEffectError
from ..graph.calls import PythonCall, Tensors


@dataclasses.dataclass(eq=False)
class GradientHook(PythonCall):
    """A hook on a gradient that no graph can hold, `name`d for messages; `where`: the user's line that registers it.

    The hook gets a copy of the gradient, and a copy of its result is the call's: a tensor that the hook keeps is in
    memory that no compiler reuses.
    """

    hook: Callable[[torch.Tensor], Any]
    name: str
    where: str

    def run(self, inputs: Tensors, after: Tensors, sizes: Sequence[int]) -> list[torch.Tensor]:
        gradient = inputs[0].clone()
        result = self.hook(gradient)
        if result is None:
            result = gradient
        elif not isinstance(result, torch.Tensor):
            raise TypeError(f"the hook `{self.name}` returned a {type(result).__name__}, where a gradient is expected")
        metadata = [(t.shape, t.dtype, t.device, t.layout) for t in (result, gradient)]
        if metadata[0] != metadata[1]:
            raise RuntimeError(
                f"the hook `{self.name}` has changed the size or type of the gradient: it got {metadata[1]} and "
                f"returned {metadata[0]}"
            )
        return [torch.empty_like(gradient).copy_(result)]

    def fake(self, inputs: Tensors, sizes: Sequence[Any]) -> list[torch.Tensor]:
        return [torch.empty_like(inputs[0].clone())]

    def without(self, absent: Sequence[bool]) -> NoReturn:
        raise UnsupportedSideEffectError(
            f"the hook `{self.name}` registered at {self.where} would get None in place of a gradient: a "
            "Function behind it gives none, or this part of the backward does not come there. Return zeros."
        )
