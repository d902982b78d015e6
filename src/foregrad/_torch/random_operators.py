"""PyTorch's random operators as functions of a generator. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def drawing_from(op: Any, generator: torch.Generator) -> Callable[..., Any] | None:
    """The random operator `op` as a function of equal arguments that draws from `generator`; None if there is none."""
    if _takes_generator(op):
        return lambda *args, **kwargs: op(*args[: _position(op)], **{**kwargs, "generator": generator})
    signature = _signature(op)
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        if _takes_generator(other) and [a for a in _signature(other) if a[0] != "generator"] == signature:
            return lambda *args, **kwargs: other(*args, **kwargs, generator=generator)
    if op is torch.ops.aten.native_dropout.default and generator.device.type == "cpu":
        return lambda source, p, train: _native_dropout(source, p, train, generator)
    return None


def _takes_generator(op: Any) -> bool:
    return any(argument.name == "generator" for argument in op._schema.arguments)


def _position(op: Any) -> int:
    """The position of the generator among the arguments; keyword-only arguments follow."""
    return next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "generator")


def _signature(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _native_dropout(
    source: torch.Tensor, p: float, train: bool | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    kept = torch.empty(source.shape, dtype=torch.bool, device=source.device).bernoulli_(1 - p, generator=generator)
    return source * kept * (0.0 if p == 1 else 1 / (1 - p)), kept
