"""Outputs that other outputs were computed from, inside: gradients pass through them where nobody sees it.

A compiled function is one node to autograd. What flows from one of its outputs into another stays within, so that a
hook on the latter, its `.grad`, or the gradient by it that `torch.autograd.grad` is asked for, would hold only what
comes from outside. Eager's hold all: so these raise. A node in C++ sees to that for its own outputs. Where views of
them or of inputs, or inputs that were written to, are such outputs too, all of them are marked as they are returned.

No way leads from the node's outputs to such views and inputs, so that a gradient by them alone would be none. The
outputs are `join`ed to them, that the engine comes by.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .._torch.engine import keeps_versions
from .._torch.hooks import asked_by, leads_to, refuse_hooks
from ..errors import UnsupportedError
from ..graph.signature import Signature
from .writes import with_history

__all__ = [
    "check_marked",
    "join",
    "join_error",
    "marked",
    "marking",
    "refuse_watched_results",
    "said_of",
    "said_of_hooked",
    "unwatched",
]

Mark = Callable[[torch.Tensor, Any], None]


def said_of(signature: Signature, name: str, what: str, after: tuple[int, ...], how: str) -> str:
    slots = [str(signature.graph_outputs[i]) for i in signature.differentiable]
    return (
        f"`{name}` computes {', '.join(slots[i] for i in after)} from {what}, which it returns as well: {how} would "
        "miss the gradient that flows through it inside. Compile what comes before it and what comes after it as two "
        "functions."
    )


# -------------------------------------------------------------------- tensors that are marked


def marking(signature: Signature, name: str, what: str, after: tuple[int, ...]) -> Mark:
    """`mark(tensor, node)` for the output called `what`, which those at positions `after` are computed from.

    `node` is the autograd node of the call.
    """

    def refuse(how: str) -> None:
        raise UnsupportedError(said_of(signature, name, what, after, how))

    def check(output: weakref.ref[torch.Tensor], node: weakref.ref[Any], gradient: Any) -> None:
        tensor, made_by = output(), node()
        if tensor is None or made_by is None:
            return
        roots = asked_by(tensor)
        if roots and leads_to(roots, made_by, after):
            refuse("the gradient by it")

    def mark(tensor: torch.Tensor, node: Any) -> None:
        if node is None or tensor.grad_fn is None or tensor._backward_hooks is not None:
            return
        reference = weakref.ref(tensor)
        node.passed.append((reference, after, refuse))
        hook = functools.partial(check, reference, weakref.ref(node))
        refuse_hooks(tensor, hook, functools.partial(refuse, "a hook on it"))

    return mark


def said_of_hooked(signature: Signature, name: str, at: int) -> str:
    return (
        f"`{name}` puts a hook on {signature.outputs[at].path}, which it returns, and computes with its own tensors in "
        "that hook or other results from that one: another hook on it, its `.grad`, or the gradient by it would not be "
        "what that hook makes of it. Put the hook on what the function returns."
    )


def unwatched(tensor: torch.Tensor, said: str) -> None:
    """From now on whoever watches the gradient of the tensor, to which the graph's backward applies a hook, is told."""

    def refuse() -> None:
        raise UnsupportedError(said)

    def check(output: weakref.ref[torch.Tensor], _gradient: Any) -> None:
        result = output()
        if result is not None and (result.retains_grad or asked_by(result)):
            refuse()

    if tensor.grad_fn is not None:
        refuse_hooks(tensor, functools.partial(check, weakref.ref(tensor)), refuse)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)  # so that it stays the object that it is
        ctx.set_materialize_grads(False)
        ctx.num_tensors = len(tensors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, *[None] * ctx.num_tensors


def join(output: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Put an edge from the history of `output` to each of the tensors, for no gradient to flow along."""
    if output.grad_fn is not None:
        with torch.enable_grad(), keeps_versions(output):
            _Join.apply(output, *tensors)


def join_error(output: torch.Tensor, error: Exception) -> None:
    """From now on a backward of `output` to every leaf raises; gradients by what it was computed from are there."""
    join(output, *with_history([torch.empty(0)], error))


def marked(
    apply: Callable[..., Any], signature: Signature, name: str, results: Sequence[int], later: Collection[int]
) -> Callable[..., Any]:
    """A node's `apply` that marks its outputs, apart from those at positions `later`.

    `node.results` will have references to those at positions `results`.
    """
    marks = [
        (position, marking(signature, name, str(signature.graph_outputs[signature.differentiable[position]]), after))
        for position, after in signature.passed
        if position not in later
    ]

    def apply_marked(*arguments: Any) -> Any:
        given = apply(*arguments)
        outputs = (given,) if isinstance(given, torch.Tensor) else given
        node: Any = outputs[0].grad_fn
        if node is not None:
            node.passed = []
            node.results = [weakref.ref(outputs[position]) for position in results]
            for position, mark in marks:
                mark(outputs[position], node)
        return given

    return apply_marked


def check_marked(ctx: Any, tangents: tuple[Any, ...]) -> None:
    """Raise where more flows through a marked output, which is to keep its gradient or which that is asked by."""
    for reference, after, refuse in ctx.passed:
        output = reference()
        if output is None or all(tangents[i] is None for i in after):
            continue
        if output.retains_grad:
            refuse("`retain_grad()`")
        if asked_by(output):
            refuse("the gradient by it")


def refuse_watched_results(ctx: Any, name: str) -> None:
    """Nobody may watch outputs that the function saved, where hooks inside see the second gradient whole."""

    def refuse() -> None:
        raise UnsupportedError(
            f"`{name}` puts hooks on its own tensors and was differentiated with create_graph=True: a hook on what it "
            "returned, or its `.grad`, would miss some of the second gradient. Put that on a copy (`output * 1`)."
        )

    for reference in ctx.results:
        output = reference()
        if output is None:
            continue
        if output._backward_hooks or output.retains_grad:
            refuse()
        if output._backward_hooks is None:
            refuse_hooks(output, lambda _gradient: None, refuse)
