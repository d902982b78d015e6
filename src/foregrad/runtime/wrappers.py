"""The last step of a call for its wrapper subclasses, after its results are made.

Watchers of an interior wrapper raise: see `passed.py`. The versions of wrappers whose plain tensors are saved are
noted: a later write moves the wrapper's counter, not the counters of its plain tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch.tensors import base_of, version_of
from ..frontend.tree import flatten
from ..graph.signature import Signature, WrapperPlace
from .passed import join, marking

__all__ = ["linking"]

Link = Callable[[Any, Mapping[int, Any], Mapping[int, Any], Any], None]


def linking(signature: Signature, name: str, saved: Sequence[WrapperPlace]) -> Link:
    """`link(result, wrappers, inputs, node)` for the function called `name`, whose autograd node this is."""
    passed = signature.passed_wrappers
    marks = [marking(signature, name, _said(one.place), one.after) for one in passed]
    before: dict[WrapperPlace, list[WrapperPlace]] = {}  # earlier wrappers are joined first
    for one in passed:
        for other in one.others:
            before.setdefault(other, []).append(one.place)
    order = sorted(before, key=lambda place: len(before[place]))
    looks_in_result = any(p.kind == "result" for p in (*saved, *order, *(one.place for one in passed)))

    def link(result: Any, wrappers: Mapping[int, Any], inputs: Mapping[int, Any], node: Any) -> None:
        leaves = flatten(result, _leaf)[0] if looks_in_result else ()
        tables: dict[str, Any] = {"result": leaves, "wrapper": wrappers, "input": inputs}

        def at(place: WrapperPlace) -> Any:
            tensor = tables[place.kind][place.number]
            return base_of(tensor) if place.of_base else tensor

        for place in order:
            join(at(place), *map(at, before[place]))
        for one, mark in zip(passed, marks, strict=True):
            mark(at(one.place), node)
        if saved and node is not None:
            tensors = list(map(at, saved))
            versions = [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors]
            node.register_prehook(lambda _: _check_versions(versions))

    return link


def _check_versions(versions: list[tuple[weakref.ref[Any], int]]) -> None:
    for reference, expected in versions:
        tensor = reference()
        if tensor is not None and version_of(tensor) != expected:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{type(tensor).__qualname__} of sizes {list(tensor.shape)} is at version {version_of(tensor)}; "
                f"expected version {expected} instead."
            )


def _leaf(_: torch.Tensor) -> None:
    """Treat wrappers as leaves."""


def _said(place: WrapperPlace) -> str:
    return f"result {place.number}" if place.kind == "result" else f"wrapper {place.number} among its inputs"
