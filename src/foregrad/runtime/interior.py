"""Interior outputs, from which other outputs were computed, for nodes in C++: their whole gradient, on demand.

In eager the gradient of a later output passes through the earlier one, where a hook sees and may change it, `.grad`
keeps it, and `torch.autograd.grad` ends. Here it stays within one node. If an earlier output is watched, the node runs
in two steps. Before any hook is called, derivatives that stop at the watched outputs give the gradients of later
outputs that arrive there, which are added to the tangents, and those that go past them to the inputs. The node itself
then runs with the tangents of the watched outputs alone, and the rest is added to its gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._torch import engine, transforms
from ..errors import UnsupportedError
from ..graph.signature import Signature
from .kept import saved_in_part
from .passed import said_of, said_of_hooked
from .release import Release

__all__ = ["Interior", "finishing"]

Gradients = Sequence[Any]
# (node, tangents, outputs to stop at, whether inputs need gradients) -> gradients of the outputs, of the inputs
Stopping = Callable[[Any, Sequence[Any], tuple[int, ...], bool], tuple[Gradients, Gradients]]


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
        self.passed = dict(signature.passed)
        outputs = [(at, getattr(signature.outputs[at], "output", None)) for at in signature.hooked_inside]
        differentiable = signature.differentiable
        self.hooked_inside = {differentiable.index(output): at for at, output in outputs if output in differentiable}

    def before(
        self, node: Any, watched: Collection[int], hooked: Collection[int], tangents: tuple[Any, ...], needed: bool
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
        past: list[Any] = []
        done: set[int] = set()

        def run(cotangents: Sequence[Any], at: tuple[int, ...]) -> None:
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
        if transforms.batch_of(tuple(tangents)) is not None:
            raise self._refusal(first, self.passed[first], "a batch of gradients by it")
        for position in stops:
            later = [q for q in self.passed[position] if q in hooked and (q in stops or tangents[q] is not None)]
            if later:
                raise self._refusal(position, (later[0],), "with a hook on that as well, what watches it")
        return self.stopping

    def _refusal(self, position: int, after: tuple[int, ...], how: str) -> UnsupportedError:
        what = str(self.signature.graph_outputs[self.signature.differentiable[position]])
        return UnsupportedError(said_of(self.signature, self.name, what, after, how))


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def finishing(
    backward: Callable[..., Any], release: Release, needs_input_grad_of: Callable[[Any], Any]
) -> Callable[..., Any]:
    """`backward(node, *tangents)` for a node whose first step may have run: see `Interior.before`."""

    def run(node: Any, *tangents: Any) -> Any:
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
