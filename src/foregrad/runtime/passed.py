"""Outputs that other outputs were computed from, inside: gradients pass through them where nobody sees it.

A compiled function is one node to autograd. What flows from one of its outputs into another stays within, so that a
hook on the latter, or its `.grad`, would hold only what comes from outside. Eager's hold all: so this is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch.hooks import before_hooks
from ..errors import UnsupportedError
from ..graph.signature import Signature

__all__ = ["check_retained", "watch_hooks"]


def watch_hooks(function: type[torch.autograd.Function], signature: Signature, name: str) -> None:
    """Have `register_hook` on such an output of `function` raise; hooks on others are called with gradients only."""
    passed = {i for i, _ in signature.passed}

    def check(position: int) -> None:
        if position in passed:
            raise UnsupportedError(_message(signature, name, position, "a hook on it"))

    before_hooks(function, check)


def check_retained(signature: Signature, name: str) -> Callable[[Any, tuple[Any, ...]], None]:
    """`check(ctx, tangents)` raises where such an output is to keep its gradient and more flows through it."""

    def check(ctx: Any, tangents: tuple[Any, ...]) -> None:
        for (position, after), reference in zip(signature.passed, ctx.passed, strict=True):
            output = reference()
            if output is not None and output.retains_grad and any(tangents[i] is not None for i in after):
                raise UnsupportedError(_message(signature, name, position, "`retain_grad()`"))

    return check


def _message(signature: Signature, name: str, position: int, what: str) -> str:
    slots = [str(signature.graph_outputs[i]) for i in signature.differentiable]
    after = dict(signature.passed)[position]
    return (
        f"`{name}` computes {', '.join(slots[i] for i in after)} from {slots[position]}, which it returns as well: "
        f"{what} would miss the gradient that flows through it inside. Compile what comes before it and what comes "
        "after it as two functions."
    )
