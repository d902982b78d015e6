"""Outputs that other outputs were computed from, inside: gradients pass through them where nobody sees it.

A compiled function is one node to autograd. What flows from one of its outputs into another stays within, so that a
hook on the latter, or its `.grad`, would hold only what comes from outside. Eager's hold all: so this is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import UnsupportedError
from ..graph.signature import Signature

__all__ = ["hook_check", "retained_check", "retained_of"]


def hook_check(signature: Signature, name: str) -> Callable[[Any], None]:
    """`check(output)` raises where a hook on this output is to be refused, which then has none."""
    passed = {i for i, _ in signature.passed}

    def check(output: Any) -> None:
        if output.output_nr in passed:
            output._backward_hooks = None  # as it was
            raise UnsupportedError(_message(signature, name, output.output_nr, "a hook on it"))

    return check


def retained_check(signature: Signature, name: str) -> Callable[[Iterable[int], Sequence[bool]], None]:
    """`check(retained, given)` raises where one of the `retained` outputs is to keep its gradient and more flows
    through it: `given` says for each tangent whether it came in.
    """
    passed = dict(signature.passed)

    def check(retained: Iterable[int], given: Sequence[bool]) -> None:
        for position in retained:
            if any(given[i] for i in passed.get(position, ())):
                raise UnsupportedError(_message(signature, name, position, "`retain_grad()`"))

    return check


def retained_of(check: Callable[[Iterable[int], Sequence[bool]], None], signature: Signature) -> Callable[..., None]:
    """`look(ctx, tangents)`: the same for a node in Python, which keeps references to such outputs (`ctx.passed`)."""
    positions = [position for position, _ in signature.passed]

    def look(ctx: Any, tangents: tuple[Any, ...]) -> None:
        outputs = [reference() for reference in ctx.passed]
        retained = [at for at, out in zip(positions, outputs, strict=True) if out is not None and out.retains_grad]
        if retained:
            check(retained, [tangent is not None for tangent in tangents])

    return look


def _message(signature: Signature, name: str, position: int, what: str) -> str:
    slots = [str(signature.graph_outputs[i]) for i in signature.differentiable]
    after = dict(signature.passed)[position]
    return (
        f"`{name}` computes {', '.join(slots[i] for i in after)} from {slots[position]}, which it returns as well: "
        f"{what} would miss the gradient that flows through it inside. Compile what comes before it and what comes "
        "after it as two functions."
    )
