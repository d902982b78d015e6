"""`torch.cond`, `torch.while_loop` and regions of a graph, as the Python they mean. Checked on torch 2.11.0, 2.13.0.

While a function is captured, a branch is a Python `if` on a value and a loop is a Python `while`: what was taken is
recorded, and what decided it becomes one of the graph's decisions. Two things differ from a plain `if`, as they do in
eager: an operand that the branch taken does not use gets a gradient of zeros, as does a tensor that only the other
branch closes over, and all results have a history as soon as one of these has. (The parameters of a module that only
the other branch closes over are no operands here: unused, they have no gradient.)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map

__all__ = ["install", "remove"]

_Cond = type(torch.ops.higher_order.cond)
_WhileLoop = type(torch.ops.higher_order.while_loop)
_Subgraph = type(torch.ops.higher_order.invoke_subgraph)
_original: dict[type, Any] = {kind: kind.__call__ for kind in (_Cond, _WhileLoop, _Subgraph)}
_original_asked = torch.compiler.is_dynamo_compiling
# The functions that users call: each asks whether Dynamo compiles it, and else has Dynamo do so.
_FRONTS = {("torch._higher_order_ops.cond", "cond"), ("torch._higher_order_ops.while_loop", "while_loop")}


class _Operands(torch.autograd.Function):
    """The operands as they are; a gradient that does not arrive is zeros."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(operand.view_as(operand) for operand in operands)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class _Result(torch.autograd.Function):
    """A result that depends on no operand, with zeros as gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*operands)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(torch.zeros_like(operand) for operand in ctx.saved_tensors)


class _Unused(torch.autograd.Function):
    """A result, with zeros as gradients of tensors that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*unused)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _connected(run: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """`run(*operands)` with the gradients that the operator as a whole has."""
    at = [i for i, operand in enumerate(operands) if _differentiable(operand) and operand.requires_grad]
    if not at or not torch.is_grad_enabled():
        return run(*operands)
    tracked = _Operands.apply(*(operands[i] for i in at))
    given = list(operands)
    for i, operand in zip(at, tracked, strict=True):
        given[i] = operand

    def connected(result: Any) -> Any:
        if not _differentiable(result) or result.requires_grad:
            return result
        return _Result.apply(result, *tracked)

    return tree_map(connected, run(*given))


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    taken, other = (true_fn, false_fn) if pred else (false_fn, true_fn)
    result = _connected(taken, tuple(operands))
    known = {id(tensor) for tensor in (*operands, *_closed_over(taken))}
    unused = [tensor for tensor in _closed_over(other) if id(tensor) not in known and tensor.requires_grad]
    if not unused or not torch.is_grad_enabled():
        return result
    return tree_map(lambda value: _Unused.apply(value, *unused) if _differentiable(value) else value, result)


def _closed_over(branch: Any) -> list[torch.Tensor]:
    """The tensors among the variables, of the functions around it and global ones, that a branch names."""
    code = getattr(branch, "__code__", None)
    if code is None:
        return []
    variables = [branch.__globals__.get(name) for name in code.co_names]
    for cell in branch.__closure__ or ():
        with contextlib.suppress(ValueError):  # not bound yet
            variables.append(cell.cell_contents)
    return list({id(value): value for value in variables if isinstance(value, torch.Tensor)}.values())


def _while_loop(
    cond_fn: Any, body_fn: Any, carried_inputs: Any, additional_inputs: Any = (), mutated_arg_indices: str = ""
) -> Any:
    count = len(carried_inputs)

    def loop(*values: Any) -> tuple[Any, ...]:
        carried, others = values[:count], values[count:]
        while cond_fn(*carried, *others):
            carried = tuple(body_fn(*carried, *others))
        return carried

    return _connected(loop, (*carried_inputs, *additional_inputs))


def _subgraph(subgraph: Any, identifier: str | None, *operands: Any) -> Any:
    return subgraph(*operands)


_MEANING: dict[type, Callable[..., Any]] = {_Cond: _cond, _WhileLoop: _while_loop, _Subgraph: _subgraph}


def install(is_capturing: Callable[[], bool]) -> None:
    """Put the meanings in place, for threads on which `is_capturing()` says so."""

    def replaced(kind: type) -> Callable[..., Any]:
        original, meaning = _original[kind], _MEANING[kind]

        def call(self: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
            return meaning(*args, **kwargs) if is_capturing() else original(self, *args, **kwargs)

        return call

    def asked() -> bool:
        frame = sys._getframe(1)
        if is_capturing() and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _FRONTS:
            return True
        return _original_asked()

    for kind in _original:
        kind.__call__ = replaced(kind)  # type: ignore[method-assign]
    torch.compiler.is_dynamo_compiling = asked


def remove() -> None:
    """Put torch's own back."""
    for kind, original in _original.items():
        kind.__call__ = original  # type: ignore[method-assign]
    torch.compiler.is_dynamo_compiling = _original_asked
