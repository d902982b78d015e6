"""Inductor's patterns, tried on a graph only if it has their operators. Checked on torch 2.13.0.

Inductor tries every pattern at each node that may be its last. Some fifty are attentions that the graph of a model does
not have; to learn that at each node is half the time of its passes over a joint graph.

Known weakness: an operator that a replacement brings into the graph counts from the next pass on.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import threading
from collections.abc import Iterator
from typing import Any

from torch import fx

from ..locks import InPlace, Replacements, bound

_active = threading.local()
_replaced = Replacements()


@contextlib.contextmanager
def possible_patterns() -> Iterator[None]:
    """Context: on this thread, Inductor tries only those patterns of a pass whose operators are all in the graph."""
    with _patches, bound(_active, "on", True):
        yield


def _install() -> None:
    from torch._inductor.pattern_matcher import PatternMatcherPass

    original = PatternMatcherPass.apply

    def apply(self: Any, gm: Any) -> int:
        return original(_narrowed(self, gm) if getattr(_active, "on", False) else self, gm)

    _replaced.bind(PatternMatcherPass, "apply", apply)


_patches = InPlace(_install, _replaced.restore)


def _narrowed(matcher: Any, gm: Any) -> Any:
    """A pass with the patterns whose operators are in the graph. Other threads use the pass itself."""
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    present = {node.target for node in graph.nodes if node.op == "call_function"}
    narrowed = copy.copy(matcher)
    narrowed.patterns = collections.defaultdict(list)
    for key, entries in matcher.patterns.items():
        narrowed.patterns[key] = [entry for entry in entries if _is_possible(entry.pattern, present)]
    return narrowed


def _is_possible(pattern: Any, present: set[Any]) -> bool:
    return not any(present.isdisjoint(targets) for targets in _needed(pattern))


@functools.cache
def _needed(pattern: Any) -> frozenset[frozenset[Any]]:
    """Sets of functions: a pattern needs one of each in the graph. Optional and repeated parts are left out."""
    return frozenset(_functions_in(pattern))


def _functions_in(pattern: Any) -> Iterator[frozenset[Any]]:
    from torch._inductor.pattern_matcher import CallFunction, CallFunctionVarArgs, MultiOutputPattern

    if isinstance(pattern, (list, tuple)):
        parts = pattern
    elif isinstance(pattern, MultiOutputPattern):
        parts = pattern.outputs
    elif isinstance(pattern, (CallFunction, CallFunctionVarArgs)):
        yield frozenset(pattern.fns_set)
        parts = [*pattern.args, *pattern.kwargs.values()] if isinstance(pattern, CallFunction) else []
    else:
        parts = []
    for part in parts:
        yield from _functions_in(part)
