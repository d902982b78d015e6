"""Saved tensors of a node, of which a backward reads only some; saved outputs of a node in Python.

Autograd drops the saved tensors of a node in Python after any part of it has run. An output that is kept from then on
(see `release.py`) has no history, since that is the node: a derivative gets a history that runs the node's backward
(`as_output`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .release import held, parts_run

__all__ = ["as_output", "let_go", "saved_in_part"]


def let_go(node: Any) -> None:
    """Free all saved tensors of the node, after its whole backward has run."""
    node.maybe_clear_saved_tensors()
    if hasattr(node, "kept"):
        node.kept, node.parts = [None] * len(node.kept), -1


class _Output(torch.autograd.Function):
    """An output of a node without an edge to it, by which the node would keep itself alive."""

    @staticmethod
    def forward(ctx: Any, node: Any, position: int, held: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.node, ctx.position = node, position
        ctx.set_materialize_grads(False)
        return held.pop().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        node = ctx.node
        if gradient is None:
            return None, None, None, *[None] * len(node.next_functions)
        tangents = [None] * len(node._input_metadata)
        tangents[ctx.position] = gradient
        _, *gradients = node._forward_cls.backward(node, *tangents)
        return None, None, None, *gradients


def as_output(node: Any, value: torch.Tensor, position: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value with the history of the node's output at `position`; `inputs` have the histories of the node's."""
    output: torch.Tensor = _Output.apply(node, position, [value], *inputs)
    for hook in getattr(node, "hooks_of", {}).get(position, {}).values():
        output.register_hook(hook)
    return output


def saved_in_part(ctx: Any, read: Sequence[bool]) -> Sequence[Any]:
    """The node's saved tensors; None for a tensor that is not read and was written to since.

    In eager such a tensor belongs to another node, which does not run.
    """
    if not read:
        return ()
    parts = parts_run(ctx)
    if parts is not None and hasattr(ctx, "kept"):
        return held(ctx, read)
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError:
        if all(read) and parts is None:
            raise
        unpack = _unpack(ctx)
        if unpack is None:
            raise
        tensors = []
        for position, is_read in enumerate(read):
            try:
                tensors.append(unpack(position))
            except RuntimeError:
                if is_read and parts is not None:
                    raise
                if is_read:
                    break
                tensors.append(None)
        else:
            return tensors
        raise


def _unpack(ctx: Any) -> Callable[[int], Any] | None:
    """A function that gives one saved tensor of a node, by position; None for a Python node on torch 2.11."""
    if hasattr(ctx, "saved_tensor"):  # foregrad's own node in C++
        return ctx.saved_tensor  # type: ignore[no-any-return]
    try:
        saved = ctx._raw_saved_tensors
    except RuntimeError:  # all of them were freed
        return lambda position: ctx.saved_tensors[position]
    return (lambda position: saved[position].unpack()) if all(hasattr(s, "unpack") for s in saved) else None
