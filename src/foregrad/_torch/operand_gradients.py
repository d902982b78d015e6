"""Gradients of an operator that takes functions, where they differ from those of the equivalent Python.

PyTorch's operators have all their operands as inputs: one that the functions do not use gets a gradient of zeros, and
all results have a history as soon as one of the operands has. Checked on torch 2.11.0, 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["connected", "is_differentiable", "with_unused", "without_derivative"]


class _Operands(torch.autograd.Function):
    """The operands unchanged; a missing gradient is zeros."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(operand.view_as(operand) for operand in operands)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class _Unused(torch.autograd.Function):
    """A result, with zeros as gradients of tensors that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*unused)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


class _Undifferentiable(torch.autograd.Function):
    """Results whose backward raises."""

    @staticmethod
    def forward(ctx: Any, name: str, results: list[torch.Tensor], *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.operator = name
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(f"Autograd not implemented for {ctx.operator}")


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor that may have a history."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def connected(run: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """`run(*operands)` with the gradients that the operator as a whole has."""
    at = _tracked(operands)
    if not at:
        return run(*operands)
    tracked = _Operands.apply(*(operands[i] for i in at))
    arguments = list(operands)
    for i, operand in zip(at, tracked, strict=True):
        arguments[i] = operand

    def linked(result: Any) -> Any:
        if not is_differentiable(result) or result.requires_grad:
            return result
        return _Unused.apply(result, *tracked)

    return tree_map(linked, run(*arguments))


def with_unused(results: Any, unused: Sequence[torch.Tensor]) -> Any:
    """Results that give zeros as gradients to tensors that they do not depend on."""
    if not unused or not torch.is_grad_enabled():
        return results
    return tree_map(lambda value: _Unused.apply(value, *unused) if is_differentiable(value) else value, results)


def without_derivative(name: str, run: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """`run(*operands)` for an operator without a derivative: its backward raises PyTorch's error."""
    at = _tracked(operands)
    if not at:
        return run(*operands)
    with torch.no_grad():
        results = run(*operands)
    tensors: list[torch.Tensor] = []
    tree_map(lambda value: tensors.append(value) if is_differentiable(value) else None, results)
    refusing = iter(_Undifferentiable.apply(name, tensors, *(operands[i] for i in at)) if tensors else ())
    return tree_map(lambda value: next(refusing) if is_differentiable(value) else value, results)


def _tracked(operands: tuple[Any, ...]) -> list[int]:
    """The positions of the operands that gradients flow to."""
    if not torch.is_grad_enabled():
        return []
    return [i for i, operand in enumerate(operands) if is_differentiable(operand) and operand.requires_grad]
