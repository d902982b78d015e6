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
    `module`: the hook is on the backward of a module, and gets `groups` of gradients, or None where no gradient is; the
    first group may be replaced.

    The hook gets copies of the gradients, and copies of its results are the call's: a tensor that the hook keeps is in
    memory that no compiler reuses.
    """

    hook: Callable[..., Any]
    name: str
    where: str
    module: torch.nn.Module | None = None
    groups: tuple[tuple[bool, ...], ...] = ((True,),)

    def run(self, inputs: Tensors, after: Tensors, sizes: Sequence[int]) -> list[torch.Tensor]:
        copies = iter([gradient.clone() for gradient in inputs])
        groups = [tuple([next(copies) if there else None for there in group]) for group in self.groups]
        found = self.hook(*(groups[0] if self.module is None else (self.module, *groups)))
        results = groups[0] if found is None else found if self.module is not None else (found,)
        if len(results) != len(groups[0]):
            raise RuntimeError(
                f"the backward hook `{self.name}` returned {len(results)} gradients, where {len(groups[0])} "
                "are expected"
            )
        return [self._checked(g, result) for g, result in zip(groups[0], results, strict=True) if g is not None]

    def _checked(self, gradient: torch.Tensor, result: Any) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the hook `{self.name}` returned a {type(result).__name__}, where a gradient is expected")
        metadata = [(t.shape, t.dtype, t.device, t.layout) for t in (result, gradient)]
        if metadata[0] != metadata[1]:
            raise RuntimeError(
                f"the hook `{self.name}` has changed the size or type of the gradient: it got {metadata[1]} and "
                f"returned {metadata[0]}"
            )
        return torch.empty_like(gradient).copy_(result)

    def fake(self, inputs: Tensors, sizes: Sequence[Any]) -> list[torch.Tensor]:
        return [torch.empty_like(gradient.clone()) for gradient in inputs[: sum(self.groups[0])]]

    def without(self, absent: Sequence[bool]) -> NoReturn:
        raise UnsupportedSideEffectError(
            f"the hook `{self.name}` registered at {self.where} would get None in place of a gradient: a "
            "Function behind it gives none, or this part of the backward does not come there. Return zeros."
        )
