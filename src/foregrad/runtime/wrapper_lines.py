"""Wrapper subclasses in rendered code: wrappers among the results, their histories, and wrappers that are saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch.histories import views_taken_at_once
from .._torch.tensors import base_of, version_of, view_again
from ..frontend.tree import flatten
from ..graph.effect_log import MarkWrapper
from ..graph.signature import Signature, WrapperOutput, WrapperPlace
from ..graph.source import unpacked
from ..identity import ById
from ..subclasses.conversion import giving_history, unwrapping
from .lines import LineWriter
from .node import NodeSource
from .passed import join, marking


class WrapperLines:
    """Lines for wrappers. `variables`: the variables of the wrappers that inputs are parts of."""

    def __init__(self, writer: LineWriter, variables: Sequence[str], signature: Signature, name: str) -> None:
        self.writer, self.variables, self.signature, self.name = writer, variables, signature, name
        self.views: ById[Any, str] = ById()  # by the stand-in of the view, or the node of several

    def output(self, info: WrapperOutput) -> str:
        """The variable of a wrapper among the inputs, or of a view of one, which is one object in all places."""
        wrapper, writer = self.variables[info.wrapper], self.writer
        if info.view is None:
            return wrapper
        name = self.views.get(info.view)
        if name is None:
            name = self.views[info.view] = writer.names.fresh("view")
            at_once = views_taken_at_once(info.view) if info.grad_enabled else None
            if at_once is not None:
                writer.lines.append(f"{name} = {self._at_once(wrapper, *at_once)}[{info.view.output_nr}]")
                return name
            if info.is_detached:
                writer.lines.append(f"{name} = {wrapper}.detach()")
                return name
            numbers = [] if info.numbers is None else [f"[{', '.join(map(str, map(writer.literal, info.numbers)))}]"]
            arguments = ", ".join([writer.bind("view", info.view), wrapper, *numbers])
            guards = [] if info.grad_enabled else [f"{writer.bind('no_grad', torch.no_grad)}()"]
            writer.under(guards, [f"{name} = {writer.bind('view_again', view_again)}({arguments})"])
        return name

    def marked(self, effect: MarkWrapper, inputs: Sequence[str]) -> None:
        """One requires grad now: so do the plain tensors that stand for it."""
        wrapper = effect.input - len(inputs)
        parts = [inputs[part] for part in self.signature.structure.wrapper_parts[wrapper]]
        take = self.writer.bind("unwrap", unwrapping(effect.spec, effect.gradient))
        self.writer.lines.append(f"{unpacked(parts)}{take}({self.variables[wrapper]})")

    def _at_once(self, wrapper: str, node: Any, take: Callable[[torch.Tensor], Any]) -> str:
        """The variable of the views that one operator gives together."""
        name = self.views.get(node)
        if name is None:
            name = self.views[node] = self.writer.names.fresh("views")
            self.writer.lines.append(f"{name} = {self.writer.bind('take', take)}({wrapper})")
        return name

    def give_history(self, wrapper: str, spec: Any, outputs: Sequence[str]) -> None:
        """Lines that give the wrapper the history of these results of the node."""
        give = self.writer.bind("give_history", giving_history(spec))
        self.writer.lines.append(f"{give}({', '.join([wrapper, *outputs])})")

    def needs_node(self, node: NodeSource) -> bool:
        """Whether `linked` needs the autograd node."""
        return bool(self.signature.gradients.passed_wrappers or self._saved(node))

    def linked(self, result: str, node: NodeSource, inputs: Sequence[str], made_by: str) -> str:
        """The expression of the result after linking: watchers of interior wrappers raise, and the node checks the
        versions of wrappers that it has saved.
        """
        saved = self._saved(node)
        places = [place for one in self.signature.gradients.passed_wrappers for place in (one.place, *one.others)]
        wrappers = {p.number: self.variables[p.number] for p in (*places, *saved) if p.kind == "wrapper"}
        plain = {p.number: inputs[p.number] for p in places if p.kind == "input"}
        tables = [", ".join(f"{number}: {name}" for number, name in table.items()) for table in (wrappers, plain)]
        name = self.writer.names.fresh("result")
        link = self.writer.bind("link_wrappers", linking(self.signature, self.name, saved))
        self.writer.lines += [f"{name} = {result}", f"{link}({name}, {{{tables[0]}}}, {{{tables[1]}}}, {made_by})"]
        return name

    def _saved(self, node: NodeSource) -> list[WrapperPlace]:
        """The wrappers whose plain tensors the node has saved."""
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
# noted: a later write moves the wrapper's counter, not the counters of its plain tensors.


Link = Callable[[Any, Mapping[int, Any], Mapping[int, Any], Any], None]


def linking(signature: Signature, name: str, saved: Sequence[WrapperPlace]) -> Link:
    """`link(result, wrappers, inputs, node)` for the function called `name`, whose autograd node this is."""
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
