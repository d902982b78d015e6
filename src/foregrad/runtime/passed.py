"""Interior outputs: further outputs were computed from these, and gradients pass through them unseen.

A compiled function is one node to autograd. A gradient that flows between its outputs stays inside, so a hook on an
interior output, its `.grad`, or its gradient from `torch.autograd.grad`, would get only the gradient from outside.
Eager's get all: so the three raise. A node in C++ handles its own outputs. If views of outputs or inputs, or written
inputs, are interior too, all are marked as they are returned.

The node's outputs have no path to interior views and inputs, so a gradient of these alone would be missing. The outputs
are `join`ed to both, for the engine's visit.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .._torch import engine, levels
from .._torch.engine import keeps_versions
from .._torch.hooks import asked_by, leads_to, refuse_hooks
from ..errors import UnsupportedError
from ..graph.joint import JointGraph
from ..graph.signature import Signature
from ..graph.source import unpacked
from .lines import LineWriter
from .release import Release, saved_in_part
from .writes import with_history

Mark = Callable[[torch.Tensor, object], None]


def said_of(signature: Signature, name: str, what: str, after: tuple[int, ...], how: str) -> str:
    slots = [str(signature.graph_outputs.slots[i]) for i in signature.gradients.differentiable]
    return (
        f"`{name}` computes {', '.join(slots[i] for i in after)} from {what}, and returns both: {how} would miss "
        "the gradient that flows inside the function. Compile the part before and the part after as two functions."
    )


# -------------------------------------------------------------------- tensors that are marked


def marking(signature: Signature, name: str, what: str, after: tuple[int, ...]) -> Mark:
    """`mark(tensor, node)` for the output called `what`, the origin of the outputs at positions `after`.

    `node` is the autograd node of the call.
    """

    def refuse(how: str) -> None:
        raise UnsupportedError(said_of(signature, name, what, after, how))

    def check(output: weakref.ref[torch.Tensor], node: weakref.ref[object], gradient: object) -> None:
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
    what = signature.structure.outputs[at].path
    return (
        f"`{name}` puts a hook on {what} and returns that tensor; the hook uses tensors of the function, or further "
        "results are computed from the tensor. A second hook, `.grad`, or a gradient by the tensor would miss the "
        "change that the hook makes. Put the hook on the returned tensor, after the call."
    )


def unwatched(tensor: torch.Tensor, message: str) -> None:
    """Make any watcher of the tensor's gradient raise, since the graph's backward applies a hook to that gradient."""

    def refuse() -> None:
        raise UnsupportedError(message)

    def check(output: weakref.ref[torch.Tensor], _gradient: object) -> None:
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
    def backward(ctx: Any, gradient: object) -> tuple[object, ...]:
        return gradient, *[None] * ctx.num_tensors


def join(output: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Add edges without gradients from the history of `output` to the tensors."""
    if output.grad_fn is not None:
        with torch.enable_grad(), keeps_versions(output):
            _Join.apply(output, *tensors)


def join_error(output: torch.Tensor, error: Exception) -> None:
    """Make a backward of `output` to every leaf raise; gradients of the tensors that it was computed from are fine."""
    join(output, *with_history([torch.empty(0)], error))


def history_lines(writer: LineWriter, joint: JointGraph, outputs: Sequence[str]) -> list[str]:
    """Lines that give a history to outputs that require grad though their gradient leads nowhere, or raises."""
    groups: dict[int | None, list[str]] = {}
    for i in joint.signature.gradients.rootless:
        groups.setdefault(id(joint.raising[i]) if i in joint.raising else None, []).append(outputs[i])
    errors = {id(error): error for error in joint.raising.values()}
    lines = []
    for group, rootless in groups.items():
        raised = "" if group is None else f", {writer.bind('backward_error', errors[group])}"
        call = f"{writer.bind('with_history', with_history)}([{', '.join(rootless)}]{raised})"
        lines.append(f"{unpacked(rootless)}{call}")
    for i in sorted(joint.raising.keys() - {*joint.signature.gradients.rootless}):
        error = writer.bind("backward_error", joint.raising[i])
        lines.append(f"{writer.bind('join_error', join_error)}({outputs[i]}, {error})")
    return lines


def marked(
    apply: Callable[..., Any], signature: Signature, name: str, results: Sequence[int], later: Collection[int]
) -> Callable[..., Any]:
    """A node's `apply` that marks its outputs, except those at positions `later`.

    `node.results` gets weak references to the outputs at positions `results`.
    """
    marks = [
        (
            position,
            marking(
                signature, name, str(signature.graph_outputs.slots[signature.gradients.differentiable[position]]), after
            ),
        )
        for position, after in signature.gradients.passed
        if position not in later
    ]

    def apply_marked(*arguments: Any) -> object:
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


def check_marked(ctx: Any, tangents: tuple[object, ...]) -> None:
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


# -------------------------------------------------------------------- for nodes in C++
# The whole gradient of an interior output, for nodes in C++: computed if the output is watched.
#
# In eager the gradient of a later output passes through the earlier one, where a hook sees and may change it, `.grad`
# keeps it, and `torch.autograd.grad` ends. Here it stays within one node. If an earlier output is watched, the node
# runs in two steps. Before any hook is called, derivatives that stop at the watched outputs give two kinds of
# gradients: gradients of later outputs that arrive at a watched output, which are added to its tangent, and gradients
# that go past, to the inputs. The node itself then runs with the tangents of the watched outputs alone, and the rest is
# added to its gradients.


Gradients = Sequence[Any]
# (node, tangents, outputs to stop at, whether inputs need gradients) -> gradients of the outputs, of the inputs
Stopping = Callable[[object, Sequence[Any], tuple[int, ...], bool], tuple[Gradients, Gradients]]


@dataclasses.dataclass(slots=True)
class _Rest:
    """The second step of a node: the tangents that it runs with, and the gradients that are added to its own."""

    keep: frozenset[int]
    gradients: Gradients
    mask: tuple[bool, ...]


class Interior:
    """The interior outputs of one compiled function."""

    def __init__(self, signature: Signature, name: str, stopping: Stopping | None) -> None:
        self.signature, self.name, self.stopping = signature, name, stopping
        self.passed = dict(signature.gradients.passed)
        outputs = [
            (at, getattr(signature.structure.outputs[at], "output", None)) for at in signature.gradients.hooked_inside
        ]
        differentiable = signature.gradients.differentiable
        self.hooked_inside = {differentiable.index(output): at for at, output in outputs if output in differentiable}

    def before(
        self,
        node: object,
        watched: Collection[int],
        hooked: Collection[int],
        tangents: tuple[object, ...],
        needed: bool,
    ) -> tuple[Sequence[Any], _Rest | None] | None:
        """(the whole tangents, the second step); None if no gradient arrives inside.

        `watched`: outputs that are among `inputs=`, keep their gradient, or have hooks; `hooked`: outputs with hooks.
        `needed`: the node is going to run.
        """
        for position in self.hooked_inside.keys() & set(watched):
            raise UnsupportedError(said_of_hooked(self.signature, self.name, self.hooked_inside[position]))
        stops = {p for p in watched if any(tangents[i] is not None for i in self.passed.get(p, ()))}
        stops |= {p for p in watched if any(q in stops for q in self.passed.get(p, ()))}
        if not stops:
            return None
        stopping = self._checked(stops, hooked, tangents)
        totals = list(tangents)
        outside = [None if i in stops else t for i, t in enumerate(tangents)]
        past: list[object] = []
        done: set[int] = set()

        def run(cotangents: Sequence[object], at: tuple[int, ...]) -> None:
            inner, rest = stopping(node, cotangents, at, needed)
            for position, gradient in zip(at, inner, strict=True):
                totals[position] = _sum(totals[position], gradient)
            past[:] = [_sum(a, b) for a, b in zip(past, rest, strict=True)] if past else rest

        if any(t is not None for t in outside):
            run(outside, tuple(sorted(stops)))
        # Later outputs first: earlier ones get the gradients that pass through.
        for position in sorted(stops, key=lambda p: sum(q in stops for q in self.passed.get(p, ()))):
            earlier = tuple(sorted(p for p in stops if position in self.passed.get(p, ())))
            if earlier and totals[position] is not None:
                run([t if i == position else None for i, t in enumerate(totals)], earlier)
                done.add(position)
        mask = tuple(t is not None for t in totals)
        return totals, _Rest(frozenset(stops - done), past, mask) if needed else None

    def _checked(self, stops: set[int], hooked: Collection[int], tangents: Sequence[Any]) -> Stopping:
        first = min(stops)
        if self.stopping is None:
            raise self._refusal(first, self.passed[first], "the gradient by it, with higher_order=False,")
        if levels.batch_of(tuple(tangents)) is not None:
            raise self._refusal(first, self.passed[first], "a batch of gradients by it")
        for position in stops:
            later = [q for q in self.passed[position] if q in hooked and (q in stops or tangents[q] is not None)]
            if later:
                raise self._refusal(position, (later[0],), "with a hook on that as well, what watches it")
        return self.stopping

    def _refusal(self, position: int, after: tuple[int, ...], how: str) -> UnsupportedError:
        what = str(self.signature.graph_outputs.slots[self.signature.gradients.differentiable[position]])
        return UnsupportedError(said_of(self.signature, self.name, what, after, how))


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def finishing(
    backward: Callable[..., Any], release: Release, needs_input_grad_of: Callable[[object], Any]
) -> Callable[..., Any]:
    """`backward(node, *tangents)` for a node that may have run its first step: see `Interior.before`."""

    def run(node: Any, *tangents: object) -> Any:
        rest = node.take_rest()
        if rest is None:
            return backward(node, *tangents)
        cotangents = [t if i in rest.keep else None for i, t in enumerate(tangents)]
        count = len(release.readers)
        saved = None if engine.keeps_graph() else saved_in_part(node, [False] * count)
        nobody, *gradients = backward(node, *cotangents)
        if saved is not None:
            release.after(node, rest.mask, needs_input_grad_of(node), saved)
        if rest.gradients:
            gradients = [_sum(a, b) for a, b in zip(gradients, rest.gradients, strict=True)]
        return nobody, *gradients

    return run
