"""Interior outputs, from which other outputs were computed: gradients pass through them unseen.

A compiled function is one node to autograd. A gradient that flows from one of its outputs into another stays inside, so
a hook on the latter, its `.grad`, or its gradient from `torch.autograd.grad`, would get only the gradient from outside.
Eager's get all: so these raise. A node in C++ handles its own outputs. If views of them or of inputs, or inputs that
were written to, are such outputs too, all of them are marked as they are returned.

The node's outputs have no path to such views and inputs, so a gradient of these alone would be missing. The outputs are
`join`ed to them, so that the engine visits them.
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
    """`mark(tensor, node)` for the output called `what`, from which the outputs at positions `after` are computed.

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


def unwatched(tensor: torch.Tensor, message: str) -> None:
    """Make any watcher of the tensor's gradient raise, since the graph's backward applies a hook to that gradient."""

    def refuse() -> None:
        raise UnsupportedError(message)

    def check(output: weakref.ref[torch.Tensor], _gradient: Any) -> None:
        result = output()
        if result is not None and (result.retains_grad or asked_by(result)):
            refuse()

    if tensor.grad_fn is not None:
        refuse_hooks(tensor, functools.partial(check, weakref.ref(tensor)), refuse)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)  # so that it stays one object
        ctx.set_materialize_grads(False)
        ctx.num_tensors = len(tensors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, *[None] * ctx.num_tensors


def join(output: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Add edges from the history of `output` to the tensors, along which no gradient flows."""
    if output.grad_fn is not None:
        with torch.enable_grad(), keeps_versions(output):
            _Join.apply(output, *tensors)


def join_error(output: torch.Tensor, error: Exception) -> None:
    """Make a backward of `output` to every leaf raise; gradients of the tensors that it was computed from are fine."""
    join(output, *with_history([torch.empty(0)], error))


def marked(
    apply: Callable[..., Any], signature: Signature, name: str, results: Sequence[int], later: Collection[int]
) -> Callable[..., Any]:
    """A node's `apply` that marks its outputs, except those at positions `later`.

    `node.results` gets weak references to the outputs at positions `results`.
    """
    marks = [
        (position, marking(signature, name, str(signature.graph_outputs[signature.differentiable[position]]), after))
        for position, after in signature.passed
        if position not in later
    ]

    def apply_marked(*arguments: Any) -> Any:
        returned = apply(*arguments)
        outputs = (returned,) if isinstance(returned, torch.Tensor) else returned
        node: Any = outputs[0].grad_fn
        if node is not None:
            node.passed = []
            node.results = [weakref.ref(outputs[position]) for position in results]
            for position, mark in marks:
                mark(outputs[position], node)
        return returned

    return apply_marked


def check_marked(ctx: Any, tangents: tuple[Any, ...]) -> None:
    """Raise if an inside gradient flows through a marked output that retains its gradient or is among `inputs=`."""
    for reference, after, refuse in ctx.passed:
        output = reference()
        if output is None or all(tangents[i] is None for i in after):
            continue
        if output.retains_grad:
            refuse("`retain_grad()`")
        if asked_by(output):
            refuse("the gradient by it")


def refuse_watched_results(ctx: Any, name: str) -> None:
    """Make watchers of saved outputs raise, if hooks inside see the whole second gradient."""

    def refuse() -> None:
        raise UnsupportedError(
            f"`{name}` puts hooks on its own tensors and was differentiated with create_graph=True: a hook on its "
            "result, or the result's `.grad`, would miss some of the second gradient. Use a copy (`output * 1`)."
        )

    for reference in ctx.results:
        output = reference()
        if output is None:
            continue
        if output._backward_hooks or output.retains_grad:
            refuse()
        if output._backward_hooks is None:
            refuse_hooks(output, lambda _gradient: None, refuse)
