"""Outputs that other outputs were computed from, of nodes in C++: what is asked of them is worked out when asked for.

To eager the gradient of a later output passes through the earlier one, where a hook sees and may change it, `.grad`
keeps it, and `torch.autograd.grad` ends. Here it stays within one node. Where an earlier output is watched, the node
runs in two steps. Before any hook is called, derivatives that stop at the watched outputs give what arrives there of
the later ones, which is added to the tangents, and what goes past them to the inputs. The node itself then runs with
the tangents of the watched outputs alone, and the rest is added to what it returns.
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
# (node, tangents, outputs to stop at, whether gradients by inputs are wanted) to those by the outputs, by the inputs
Stopping = Callable[[Any, Sequence[Any], tuple[int, ...], bool], tuple[Gradients, Gradients]]


@dataclasses.dataclass(slots=True)
class _Rest:
    """What is left for the node to do: the tangents that it runs with, and what is added to its gradients."""

    keep: frozenset[int]
    gradients: Gradients
    mask: tuple[bool, ...]


class Interior:
    """The outputs of one compiled function that others were computed from."""

    def __init__(self, signature: Signature, name: str, stopping: Stopping | None) -> None:
        self.signature, self.name, self.stopping = signature, name, stopping
        self.passed = dict(signature.passed)
        outputs = [(at, getattr(signature.outputs[at], "output", None)) for at in signature.hooked_inside]
        differentiable = signature.differentiable
        self.hooked_inside = {differentiable.index(output): at for at, output in outputs if output in differentiable}

    def before(
        self, node: Any, watched: Collection[int], hooked: Collection[int], tangents: tuple[Any, ...], needed: bool
    ) -> tuple[Sequence[Any], _Rest | None] | None:
        """The tangents with what arrives inside, and what `after` is to know; None where nothing does.

        `watched`: outputs that are asked for, or keep their gradient, or have hooks, `hooked` the last. `needed`: the
        node is going to run.
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
        found: list[Any] = []
        done: set[int] = set()

        def run(given: Sequence[Any], at: tuple[int, ...]) -> None:
            inner, rest = stopping(node, given, at, needed)
            for position, gradient in zip(at, inner, strict=True):
                totals[position] = _sum(totals[position], gradient)
            found[:] = [_sum(a, b) for a, b in zip(found, rest, strict=True)] if found else rest

        if any(t is not None for t in outside):
            run(outside, tuple(sorted(stops)))
        # Those that come last first: those before them get what passes through.
        for position in sorted(stops, key=lambda p: sum(q in stops for q in self.passed.get(p, ()))):
            earlier = tuple(sorted(p for p in stops if position in self.passed.get(p, ())))
            if earlier and totals[position] is not None:
                run([t if i == position else None for i, t in enumerate(totals)], earlier)
                done.add(position)
        mask = tuple(t is not None for t in totals)
        return totals, _Rest(frozenset(stops - done), found, mask) if needed else None

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


def finishing(backward: Callable[..., Any], release: Release, wanted_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """`backward(node, *tangents)` for a node that may have been run in part: see `Interior.before`."""

    def run(node: Any, *tangents: Any) -> Any:
        rest = node.take_rest()
        if rest is None:
            return backward(node, *tangents)
        given = [t if i in rest.keep else None for i, t in enumerate(tangents)]
        count = len(release.readers)
        saved = None if engine.keeps_graph() else saved_in_part(node, [False] * count)
        nobody, *gradients = backward(node, *given)
        if saved is not None:
            release.after(node, rest.mask, wanted_of(node), saved)
        if rest.gradients:
            gradients = [_sum(a, b) for a, b in zip(gradients, rest.gradients, strict=True)]
        return nobody, *gradients

    return run
