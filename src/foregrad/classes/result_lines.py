"""Wrapper subclasses in rendered code: wrappers among the results, their histories, and wrappers that are saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch.tensors import version_of
from ..frontend.tree import flatten
from ..graph.signature import Signature, WrapperPlace
from ..runtime.lines import LineWriter
from ..runtime.node import NodeSource
from ..runtime.passed import join, marking


class ResultLines:
    """Lines for wrappers. `variables`: the variables of the wrappers that inputs are parts of."""

    def __init__(self, writer: LineWriter, variables: Sequence[str], signature: Signature) -> None:
        self.writer, self.variables, self.signature = writer, variables, signature

    def needs_node(self, node: NodeSource) -> bool:
        """Whether `linked` needs the autograd node."""
        return bool(self.signature.gradients.passed_wrappers or self._saved(node))

    def linked(self, result: str, node: NodeSource, inputs: Sequence[str], made_by: str, name: str) -> str:
        """The expression of the result of the function `name` after linking: watchers of interior wrappers raise, and
        the node checks the versions of wrappers that it has saved.
        """
        saved = self._saved(node)
        places = [place for one in self.signature.gradients.passed_wrappers for place in (one.place, *one.others)]
        wrappers = {p.number: self.variables[p.number] for p in (*places, *saved) if p.kind == "wrapper"}
        plain = {p.number: inputs[p.number] for p in places if p.kind == "input"}
        tables = [", ".join(f"{number}: {one}" for number, one in table.items()) for table in (wrappers, plain)]
        linked = self.writer.names.fresh("result")
        link = self.writer.bind("link_wrappers", linking(self.signature, name, saved))
        self.writer.lines += [f"{linked} = {result}", f"{link}({linked}, {{{tables[0]}}}, {{{tables[1]}}}, {made_by})"]
        return linked

    def _saved(self, node: NodeSource) -> list[WrapperPlace]:
        """The wrappers with plain tensors that the node has saved."""
        parts = enumerate(self.signature.structure.wrapper_parts)
        wrappers = [WrapperPlace("wrapper", number) for number, inside in parts if node.held_inputs & set(inside)]
        results: list[Any] = [
            place for place, made_of in self.signature.gradients.wrapper_results if node.held_outputs & made_of
        ]
        return [*wrappers, *results]


# -------------------------------------------------------------------- what the lines call
# The last step of a call for its wrapper subclasses, after its results are made.
#
# Watchers of an interior wrapper raise: see `passed.py`. The versions of wrappers whose plain tensors are saved are
# noted: a later write moves the wrapper's counter, not its plain tensors' counters.


Link = Callable[[Any, Mapping[int, Any], Mapping[int, Any], Any], None]


def linking(signature: Signature, name: str, saved: Sequence[WrapperPlace]) -> Link:
    """`link(result, wrappers, inputs, node)` for the autograd node of the function called `name`."""
    passed = signature.gradients.passed_wrappers
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
            return tables[place.kind][place.number]

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
