"""Differentiating a captured function once more: the capture goes on where it stopped.

The fakes that a capture ran on keep their autograd history, so the backward of a backward needs no second run of the
user's function: eager's own engine is run over the fakes with `create_graph`, the recorder still writing to the same
tape. So differentiation, stops (detach, no_grad) and refusals are eager's, at any order. The new graph starts from the
earlier graph's residuals, matched by value number: it computes no kept value again, and draws no random number a second
time.

Known weakness: a value that neither was saved nor follows from saved values is refused by name. This takes a
partitioner that saves values besides the reads of the operators' derivatives.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.graphs import symbol_of
from ..._torch.symbols import Size, concrete, has_symbolic
from ..._torch.wrappers import is_wrapper, parts_of
from ...errors import ForegradError, UnsupportedError, UnsupportedLayoutError, without_frames
from ...frontend.openings import opener
from ...graph.meta import UNDESCRIBED, contiguous_strides
from ...graph.slots import Grad, Part, Slot, Tangent
from ...graph.tangents import CONSTANT, STOP, VARIABLE, BackwardCase, TangentKind, place_of_size
from ...identity import ById
from ..recorder.backward_writes import Run
from ..tape.gradient_paths import cut_at, other_leaves, reached_from
from ..tape.tape import Entry
from .backward import errors_behind, raise_behind
from .derived_graph import DerivedOutput, RecordedBackward, derivative_of
from .resumable_trace import Derivative, GradientRef, ResumableTrace, ValueRef, WrappedRef, run_engine


class Differentiation(RecordedBackward):
    """The work of making the backward of `origin` for one `case`: `run` gives it.

    `forward` is the function's forward graph and `saved` its saved nodes (None: given up since), among them the
    differentiable outputs at positions `results`; inputs at `written` are saved as copies of their former values.
    `at_hand`: the values in `saved` and the tangents (None: absent) of the present call; the values that the
    derivative's own operators read come from there. Raises `UnsupportedError` for a value that is not at hand any more,
    and eager's error for a derivative that does not exist.
    """

    def __init__(
        self,
        origin: ResumableTrace,
        forward: fx.GraphModule,
        saved: Sequence[fx.Node | None],
        results: Sequence[int],
        written: frozenset[int],
        case: BackwardCase,
        at_hand: Callable[[], tuple[Sequence[object], Sequence[object]]] = lambda: ((), ()),
    ) -> None:
        self.values = at_hand
        self.create_graph, self.pattern, self.kinds = case.create_graph, case.pattern, case.kinds
        self.num_outputs = len(origin.outputs)
        origin = with_tangents(origin, case.kinds)
        self.origin, self.session, self.recorder = origin, origin.session, origin.session.recorder
        self.given = [i for i, kind in enumerate(case.pattern) if kind in (CONSTANT, VARIABLE)]
        self.stops = [i for i, kind in enumerate(case.pattern) if kind == STOP]
        self.sinks = [i for i, leaf in enumerate(origin.leaves) if leaf is not None]
        wanted = case.needs_input_grad
        self.needs_input_grad = [i for i in self.sinks if wanted is None or i in wanted]
        self.results = [] if origin.session.has_hooks else list(results)
        self.start = len(self.recorder.tape.entries)
        self.backward_error, self.second_done = None, Run()
        self.outputs, self.made, self.saved, self.sizes = [], [], [], []
        self.valued, self.raised, self.rootless = set(), {}, []
        self._find_saved(forward, saved, written)

    def _find_saved(self, forward: fx.GraphModule, saved: Sequence[fx.Node | None], written: frozenset[int]) -> None:
        """The value number of each saved value, and the inputs that are at hand with their values."""
        numbering = self.session.numbering
        numbering.extend()
        numbers = numbering.of_nodes(forward, self.origin.inputs, self.origin.random)
        positions = {node: i for i, node in enumerate(n for n in forward.graph.nodes if n.op == "placeholder")}
        self.numbers_saved = [None if node is None else numbers.get(node) for node in saved]
        for index, node in enumerate(saved):
            if node is None:
                continue
            position = positions.get(node)
            if position in self.origin.valueless:
                continue
            if position in self.sinks and position not in written:
                self.valued.add(position)
            elif symbol_of(node.meta.get("val")) is not None:
                self.sizes.append((ValueRef("saved", index), node.meta["val"]))
            elif node in numbers:
                self.saved.append((ValueRef("saved", index), numbers[node]))

    def run(self) -> Derivative:
        try:
            with self.session.decisions.deriving(self.origin.known, self._at_hand):
                return self._run()
        finally:
            self.recorder.origins.forget()  # a backward's frame: its node holds this session's owner

    def _at_hand(self) -> dict[int, object]:
        """The call's real values by value number."""
        numbering = self.session.numbering
        saved, tangents = self.values()
        found = {n: v for n, v in zip(self.numbers_saved, saved, strict=True) if n is not None and v is not None}
        for (_, entry), position in zip(self.tangents, self.given, strict=True):
            found[numbering.of(entry)] = tangents[position]
        return found

    def _run(self) -> Derivative:
        origin, session, given = self.origin, self.session, self.given
        stops = [origin.outputs[i] for i in self.stops]
        # With tangents of other kinds, the gradient of a wrapper among the inputs may be anything.
        wrappers = origin.wrappers.items() if self.kinds else ()
        edges = {places: edge for places, edge in wrappers if not set(places).isdisjoint(self.needs_input_grad)}
        within = {i for places in edges for i in places}
        plain = [i for i in self.needs_input_grad if i not in within]
        whole = [min(i for i in places if i in self.sinks) for places in edges]
        leaves: list[Any] = [*(origin.leaves[i] for i in plain), *edges.values(), *stops]
        self.tangents = [
            session.tangent(origin.tangent_specs[i], requires_grad=self.pattern[i] == VARIABLE) for i in given
        ]
        fakes = [fake for fake, _ in self.tangents]
        outputs, late = [origin.outputs[i] for i in given if i < self.num_outputs], self.recorder.late
        late.restore(origin.versions)
        is_whole = session.has_hooks and len(self.needs_input_grad) == len(self.sinks)
        others = other_leaves(outputs, leaves) if is_whole else []  # hooks of these run, too
        with session.recording(fakes), cut_at([*self._variables()[: len(self.sinks)], *stops]):
            arriving = [*fakes[: len(outputs)], *tangents_of(origin, self.kinds, fakes[len(outputs) :])]
            outputs += [result_of(origin, kind) for kind in self.kinds]
            found = run_engine(outputs, [*leaves, *others], arriving, create_graph=self.create_graph)
            apart = [opener().taken_apart(gradient) if is_wrapper(gradient) else None for gradient in found]
        slots = [*(origin.input_slots[i] for i in (*plain, *whole)), *(origin.output_slots[i] for i in self.stops)]
        refs = [self._ref(*one) for one in zip(found, apart, slots, strict=False)]
        by_input = dict(zip(plain, refs, strict=False))
        gradients = [by_input.get(i) for i in range(len(origin.inputs))]
        self.done, self.versions = late.finish(restore=False), late.versions()
        self.sources = [output for output in self.outputs if output.fake.requires_grad]
        self._check_stops(self.sources)
        seeds = [session.tangent(output.spec) for output in self.sources]
        self.seeds = [entry for _, entry in seeds]
        self.middle = len(self.recorder.tape.entries)
        self.variables = self._variables()
        self.second = self._second(self.sources, self.variables, [fake for fake, _ in seeds])
        if self.backward_error is None:
            leads_somewhere = any(self.second) or bool(self.second_done.wrapped)
            self.raised = self._errors(self.sources, [fake for fake, _ in seeds], leads_somewhere=leads_somewhere)
            if not leads_somewhere:
                self.rootless, self.sources, self.seeds = self.sources, [], []
        at = len(plain)
        of_wrappers = {i: ref for i, ref in zip(whole, refs[at:], strict=False) if ref is not None}
        return derivative_of(self, gradients, refs[at + len(whole) :], of_wrappers)

    def _check_stops(self, sources: list[DerivedOutput]) -> None:
        """Raise where a gradient depends on an output that it was asked by: that output's history is not kept."""
        stops = [i for i in self.stops if i not in self.results]
        reached = reached_from([output.fake for output in sources], [self.origin.outputs[i] for i in stops])
        for i, reach in zip(stops, reached, strict=True):
            if reach.outputs:
                raise UnsupportedError(
                    f"a gradient of `{self.session.name}` by its result {self.origin.output_slots[i]}, or a gradient "
                    "that passes a hook on it, is differentiated again and depends on the result, but the backward "
                    "does not keep it. Compile the part before and the part after as two functions."
                )

    def _ref(self, gradient: Any, parts: Sequence[torch.Tensor] | None, slot: Slot) -> GradientRef | None:
        """A gradient's place: a gradient that is no tangent becomes an output, a wrapper by its plain tensors."""
        if gradient is None:
            return None
        if parts is None:
            return self._place(gradient, Grad(slot))
        spec = opener().bare_spec(gradient)
        refs = [self._place(part, Part(Grad(slot), path)) for part, path in zip(parts, spec.paths(), strict=True)]
        self.made.append((gradient, refs))
        return WrappedRef(spec, tuple(refs))

    def _place(self, fake: torch.Tensor, slot: Slot) -> ValueRef:
        known = ById((tangent, i) for (tangent, _), i in zip(self.tangents, self.given, strict=True))
        if fake in known:
            return ValueRef("tangent", known[fake])
        number = next((n for n, output in enumerate(self.outputs) if output.fake is fake), len(self.outputs))
        if number == len(self.outputs):
            entry = self.recorder.entry_of(fake)
            if entry.spec is UNDESCRIBED and self.create_graph:
                raise UnsupportedLayoutError(
                    f"`{self.session.name}` was differentiated with create_graph=True, and its {slot} is sparse and "
                    "can't be differentiated again. Use an embedding with sparse=False there, or compute the "
                    "gradient of the gradient in eager mode."
                )
            spec = entry.spec if entry.spec is UNDESCRIBED else self.recorder.value_of(fake).spec
            self.outputs.append(DerivedOutput(fake, entry, spec, slot))
        return ValueRef("output", number)

    def _second(
        self, sources: list[DerivedOutput], variables: list[Any], seeds: list[torch.Tensor]
    ) -> list[Entry | None]:
        """For each variable the entry of its gradient, or None."""
        if not sources or not variables:
            return [None] * len(variables)
        try:
            with self.session.recording(seeds), cut_at(variables):
                found = run_engine([output.fake for output in sources], variables, seeds, create_graph=False)
        except ForegradError:
            raise
        except RuntimeError as error:
            self.backward_error = without_frames(error)
            return [None] * len(variables)
        recorder = self.recorder
        read = [None if g is None or is_wrapper(g) else recorder.entry_of(g) for g in found]
        self.second_done = recorder.late.finish(restore=False)
        for variable, slot, gradient in zip(variables, self._variable_slots(), found, strict=True):
            if is_wrapper(gradient):
                parts = list(map(recorder.entry_of, parts_of(gradient)))
                self.second_done.wrapped.append((variable, slot, opener().bare_spec(gradient), parts))
        return read

    def _errors(
        self, sources: list[DerivedOutput], seeds: list[torch.Tensor], *, leads_somewhere: bool
    ) -> dict[int, Exception]:
        """Eager's errors on paths to no input, as after `once_differentiable`."""
        fakes = [output.fake for output in sources]
        looked_at = raise_behind(fakes) if leads_somewhere else [*range(len(fakes))]

        @contextlib.contextmanager
        def recording() -> Iterator[None]:
            with self.session.recording():
                yield
            self.recorder.late.finish(restore=False)

        picked = [fakes[i] for i in looked_at], [seeds[i] for i in looked_at]
        errors = errors_behind(*picked, self._variables(), recording)
        return {self.outputs.index(sources[looked_at[i]]): error for i, error in errors.items()}

    def _variables(self) -> list[torch.Tensor]:
        origin = self.origin
        leaves: list[Any] = [origin.leaves[i] for i in self.sinks]
        tangents = [fake for fake, _ in self.tangents if fake.requires_grad]
        return [*leaves, *tangents, *(origin.outputs[i] for i in self.results)]

    def _variable_slots(self) -> list[Slot]:
        origin = self.origin
        tangents = zip(self.tangents, self.given, strict=True)
        of_tangents = [Tangent(origin.output_slots[i]) for (fake, _), i in tangents if fake.requires_grad]
        sinks, results = (origin.input_slots[i] for i in self.sinks), (origin.output_slots[i] for i in self.results)
        return [*sinks, *of_tangents, *results]


# -------------------------------------------------------------------- tangents of other kinds
# Stand-ins, made of plain fakes, for tangents of other kinds than the function was captured for.
#
# A size of such a tangent varies where a size of the result varies: a number equal to a size of this call's result
# counts as that size.


def result_of(origin: ResumableTrace, kind: TangentKind) -> Any:
    """The result that a tangent is for."""
    return origin.made.get(kind.outputs, origin.outputs[kind.outputs[0]])


def with_tangents(origin: ResumableTrace, kinds: Sequence[TangentKind]) -> ResumableTrace:
    """The trace with a slot and a layout for each plain tensor of the `kinds` of tangents, behind the present slots."""
    slots: list[Slot] = [*origin.output_slots]
    specs = [*origin.tangent_specs]
    for kind in kinds:
        paths = [""] if kind.spec is None else kind.spec.paths()
        slots += [Part(origin.output_slots[kind.outputs[0]], f" as another kind{path}") for path in paths]
        shape = result_of(origin, kind).shape
        varies = has_symbolic(shape)
        specs += [p.fresh(_sizes_of_result(p.shape, kind, shape)) if varies else p for p in kind.parts]
    return dataclasses.replace(origin, output_slots=tuple(slots), tangent_specs=tuple(specs)) if kinds else origin


def tangents_of(
    origin: ResumableTrace, kinds: Sequence[TangentKind], fakes: Sequence[torch.Tensor]
) -> Iterator[object]:
    """The tangents of the `kinds`, made of fakes of their plain tensors."""
    rest = iter(fakes)
    for kind in kinds:
        parts = [next(rest) for _ in kind.parts]
        shape = result_of(origin, kind).shape
        if kind.spec is None:
            yield parts[0]
        elif has_symbolic(shape):
            yield opener().wrap(opener().with_sizes_of(_at_capture(kind.spec, kind, shape), parts), parts)
        else:
            yield opener().wrap(kind.spec, parts)


def _at_capture(spec: Any, kind: TangentKind, shape: Sequence[Size]) -> Any:
    """The spec with the sizes that it would have had when the function was captured."""
    own = tuple(map(concrete, _sizes_of_result(spec.shape, kind, shape)))
    inner = tuple(None if held is None else _at_capture(held, kind, shape) for held in spec.inner)
    return dataclasses.replace(spec, shape=own, stride=contiguous_strides(own), inner=inner)


def _sizes_of_result(numbers: Sequence[Size], kind: TangentKind, shape: Sequence[Size]) -> tuple[Size, ...]:
    places = [place_of_size(number, dim, kind.shape) for dim, number in enumerate(numbers)]
    return tuple(number if place is None else shape[place] for number, place in zip(numbers, places, strict=True))
