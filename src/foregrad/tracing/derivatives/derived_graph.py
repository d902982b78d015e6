"""The joint graph of a derivative: the record of a backward and of its own backward, cut out of the tape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.graphs import symbol_of, symbols_in
from ..._torch.nested import leaves
from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedError
from ...graph.effect_log import BackwardEffects, LateUpdate, Result, WrappedGradient, Write
from ...graph.joint import JointGraph
from ...graph.signature import (
    DecisionInfo,
    EffectInfo,
    GradientInfo,
    GradientPaths,
    GraphOutputs,
    InputInfo,
    Signature,
    StopInfo,
)
from ...graph.slots import Checked, Decision, Grad, Live, Part, Saved, Slot, Tangent, Updated
from ...identity import ById, IdSet
from ..heap.alias import memory_root, not_own
from ..heap.records import InputRecord
from ..heap.refusals import written_by_backward
from ..heap.views import undone
from ..recorder.backward_writes import Run
from ..recorder.recorder import Recorder
from ..tape.gradient_paths import passed_through, reached_from, saving_nodes
from ..tape.graph import build_module, symbols_of_inputs
from ..tape.tape import Entry, Tape, entries_in, map_entries
from ..values.prefix import generators_drawn_from
from .resumable_trace import Derivative, GradientRef, ResumableTrace, ValueRef, read_again

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DerivedOutput:
    """One value that the derivative gives; its spec is `UNDESCRIBED` where it is sparse."""

    fake: torch.Tensor
    entry: Entry
    spec: Any
    slot: Slot


class RecordedBackward:
    """The tape's record of the backward of `origin`, and of that backward's own backward: see `Differentiation`.

    The backward's entries start at `start`, its own backward's at `middle`. `given` are the positions of the outputs
    with a tangent, `tangents` the tangents' fakes and entries. Of the `outputs`, `sources` have a history that leads to
    a variable, and take the tangents `seeds`; `rootless` outputs require grad and lead to none. `variables` are the
    tensors that the derivative can be differentiated by, `second` the entries of the gradients. `valued` are the inputs
    with their own values at hand, `saved` and `sizes` the other values, `results` the values that are outputs of the
    function. `done` and `second_done` are the effects of both backwards, `backward_error` the second backward's error,
    and `raised` its errors by output. `made`: gradients that are wrapper subclasses, with their plain tensors' places.
    """

    origin: ResumableTrace
    start: int
    middle: int
    given: list[int]
    tangents: list[tuple[torch.Tensor, Entry]]
    outputs: list[DerivedOutput]
    sources: list[DerivedOutput]
    rootless: list[DerivedOutput]
    seeds: list[Entry]
    variables: list[torch.Tensor]
    second: list[Entry | None]
    results: list[int]
    sinks: list[int]
    valued: set[int]
    saved: list[tuple[ValueRef, int]]
    sizes: list[tuple[ValueRef, Any]]
    done: Run
    second_done: Run
    backward_error: Exception | None
    raised: dict[int, Exception]
    versions: ById[torch.Tensor, int]
    made: list[tuple[Any, list[ValueRef]]]


class _Graph:
    """The entries of the derivative's graph: copies of the part of the tape that it takes."""

    def __init__(self, recorded: RecordedBackward) -> None:
        self.recorded = recorded
        origin, session = recorded.origin, recorded.origin.session
        self.session, self.numbering, recorder = session, session.numbering, session.recorder
        live = [live.slot for live in recorder.late.live]
        tangents = [Tangent(origin.output_slots[i]) for i in recorded.given]
        seeds = [Tangent(output.slot) for output in recorded.sources]
        self.own = effects_of(recorder, recorded.done, live, tangents)  # the effects of the backward that this graph is
        self.later = effects_of(recorder, recorded.second_done, live, seeds)  # the effects of its own backward
        self.numbering.extend()
        gradient_of = ById(zip(recorded.variables, recorded.second, strict=True))
        wrapped = IdSet(self.later.leaves)
        outputs = [(i, origin.outputs[i]) for i in recorded.results]
        results = [i for i, output in outputs if gradient_of[output] is not None or output in wrapped]
        self.cut = cut = Cut(recorded, results)
        self.decided = session.decisions.made
        ends = (
            *(output.entry for output in recorded.outputs),
            *(decided.entry for decided in self.decided),
            *self.own.entries,
        )
        self.entries = [cut.copy(entry) for entry in ends]
        drawn = [entry for entry in recorder.tape.entries[recorded.start :] if entry.has_effect]
        for entry in drawn:
            if self.numbering.position(self.numbering.of(entry)) < recorded.middle:
                cut.copy(entry)
        cut.in_backward = True
        gradients = [None if (e := gradient_of[v]) is None else cut.copy(e) for v in recorded.variables]
        self.late = [cut.copy(entry) for entry in self.later.entries]
        for entry in drawn:
            cut.copy(entry)
        cut.drop_unused(wrapped | (leaf for leaf, entry in gradient_of.items() if entry is not None))
        cut.add_sizes()
        self.inputs, self.feeds, self.slots, self.originals, self.leaves = cut.inputs()
        copy_of = ById(zip(recorded.variables, gradients, strict=True))
        self.returned = [copy_of.get(leaf) if leaf is not None else None for leaf in self.leaves]
        self.tape, self.random_originals = cut.tape()
        self.numbers = cut.numbers()

    def module(self) -> fx.GraphModule:
        recorder = self.session.recorder
        return build_module(
            self.tape,
            self.inputs,
            [*self.cut.seeds, *self.cut.late],
            [*self.entries, *self.returned, *self.late],
            recorder.fake_mode,
            "JointGraph",
            recorder.is_symbolic,
            self.numbers,
        )

    def signature(self) -> Signature:
        recorded, own, decided = self.recorded, self.own, self.decided
        outputs, sources = recorded.outputs, recorded.sources
        count = len(outputs) + len(decided)
        live = sorted((place.index, i) for i, place in enumerate(self.feeds) if place.kind == "live")
        fakes = [output.fake for output in sources]
        may_stop = bool(decided or own.effects.checks)
        drawn = [original for _, original in self.random_originals] if may_stop else []
        return Signature(
            inputs=tuple(
                InputInfo(slot, entry.tensor, leaf is not None, False)
                for slot, entry, leaf in zip(self.slots, self.inputs, self.leaves, strict=True)
            ),
            graph_outputs=GraphOutputs(
                (*(o.slot for o in outputs), *(Decision(d.where) for d in decided), *own.slots),
                (*(o.spec for o in outputs), *(e.tensor for e in self.entries[len(outputs) :])),
                not_own(self.entries),
            ),
            gradients=GradientInfo(
                self.differentiable,
                tuple(entry.tensor for entry in recorded.seeds),
                tuple(entry is not None for entry in self.returned),
                rootless=tuple(outputs.index(output) for output in recorded.rootless),
                reached_from=_reached(fakes, self.leaves),
                saving=saving_nodes(fakes, self.leaves),
                passed=passed_through(fakes)[0],
            ),
            effects=EffectInfo(self._writes(count)),
            stops=StopInfo(
                tuple(DecisionInfo(len(outputs) + i, d.value, d.where, d.is_tensor) for i, d in enumerate(decided)),
                tuple(check.behind(count) for check in own.effects.checks),
                generators_drawn_from(drawn),
            ),
            symbols=symbols_of_inputs(self.inputs, self.numbers),
            backward=self.later.of(self.leaves, tuple(i for _, i in live) if sources else ()),
        )

    def _writes(self, count: int) -> tuple[Write, ...]:
        """The writes of the backward. `count`: the number of outputs before the writes'."""
        number = {(place.kind, place.index): i for i, place in enumerate(self.feeds)}
        found = []
        for update in self.own.effects.updates:
            key = ("tangent", self.recorded.given[update.tangent]) if update.live is None else ("live", update.live)
            found.append(Write(number[key], update.output + count, differentiable=False, counted=update.counted))
        return tuple(found)

    @property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, output in enumerate(self.recorded.outputs) if output in self.recorded.sources)

    def resumable(self, signature: Signature) -> ResumableTrace:
        """The start of the next derivative."""
        recorded, session = self.recorded, self.session
        outputs = [recorded.outputs[i] for i in self.differentiable]
        feeds = enumerate(self.feeds)
        return ResumableTrace(
            session,
            tuple(output.fake for output in outputs),
            tuple(output.slot for output in outputs),
            signature.gradients.tangent_specs,
            tuple(self.originals),
            tuple(self.leaves),
            tuple(self.slots),
            {copy.name: original for copy, original in self.random_originals if copy.name is not None},
            read_again(self.tape),
            session.decisions.now_known(),
            frozenset(i for i, ref in feeds if ref.kind == "input" and ref.index not in recorded.valued),
            recorded.versions,
            self._made(),
        )

    def _made(self) -> dict[tuple[int, ...], Any]:
        """The gradients that are wrapper subclasses, by their plain tensors' places among differentiable outputs."""
        positions = {output: at for at, output in enumerate(self.differentiable)}
        found = {}
        for gradient, refs in self.recorded.made:
            places = tuple(positions[ref.index] for ref in refs if ref.kind == "output" and ref.index in positions)
            if gradient.requires_grad and places:
                found[places] = gradient
        return found


def derivative_of(
    recorded: RecordedBackward,
    gradients: list[GradientRef | None],
    stops: list[GradientRef | None],
    whole: dict[int, GradientRef],
) -> Derivative:
    """The derivative as a function of its own; `gradients` of the inputs, `stops` of the outputs stopped at, `whole` of
    wrapper subclasses.
    """
    graph, origin = _Graph(recorded), recorded.origin
    signature = graph.signature()
    session = origin.session
    recorder = session.recorder
    is_gradient = any(isinstance(slot, Grad) for slot in origin.output_slots)
    joint = JointGraph(
        session.name if is_gradient else f"backward of {session.name}",
        graph.module(),
        signature,
        recorder.fake_mode,
        recorded.backward_error,
        symbols=recorder.decisions.numbers.table,
        raising=recorded.raised,
    )
    resumable = graph.resumable(signature)
    return Derivative(joint, resumable, tuple(graph.feeds), tuple(gradients), tuple(stops), whole)


def _reached(fakes: list[torch.Tensor], leaves: list[torch.Tensor | None]) -> tuple[GradientPaths, ...]:
    """For each input its leading outputs, where there are several."""
    if len(fakes) < 2 or any(fake.grad_fn is None for fake in fakes):
        return ()
    return tuple(reached_from(fakes, leaves))


# -------------------------------------------------------------------- the part of the tape
# The part of a capture's tape that makes a derivative: from the values at hand to the gradients that are asked for.


class Cut:
    """The part of the tape between the values at hand and the wanted values, copied, with its inputs."""

    def __init__(self, recorded: RecordedBackward, results: list[int]) -> None:
        """`results`: the positions of outputs that the function saves for itself."""
        origin = recorded.origin
        self.recorded, self.session = recorded, origin.session
        self.recorder, self.numbering = self.session.recorder, self.session.numbering
        self.in_backward = False  # entries copied from now on belong to the backward
        self.copies: dict[int, Entry] = {}  # by number
        self.used: set[int] = set()
        self.sizes: dict[Entry, Any] = {}  # the numbers that saved sizes are
        self.sources: list[tuple[ValueRef, Slot, Entry, torch.Tensor | None, Entry]] = []
        self.seeds = [self._input(entry) for entry in recorded.seeds]
        for i in results:
            value = self.recorder.value_of(origin.outputs[i])
            entry = value.read(self.recorder.emit)
            self.sources.append((ValueRef("result", i), origin.output_slots[i], entry, value.fake, self._input(entry)))
        for i in recorded.sinks:
            entry = origin.inputs[i]
            own = self._input(entry) if i in recorded.valued else Entry(None, spec=entry.spec)
            self.sources.append((ValueRef("input", i), origin.input_slots[i], entry, origin.leaves[i], own))
        for i, (fake, entry) in zip(recorded.given, recorded.tangents, strict=True):
            leaf = fake if fake.requires_grad else None
            self.sources.append(
                (ValueRef("tangent", i), Tangent(origin.output_slots[i]), entry, leaf, self._input(entry))
            )
        for i, (live, entry) in enumerate(zip(self.recorder.late.live, recorded.done.live, strict=True)):
            self.sources.append((ValueRef("live", i), Live(live.slot), entry, None, self._input(entry)))
        self.late = [self._input(entry) for entry in recorded.second_done.live]  # likewise in this backward's backward
        self.saved: dict[int, tuple[ValueRef, Slot, Entry, None, Entry]] = {}
        for place, number in recorded.saved:
            first = self.numbering.first[number]
            if number not in self.copies:
                slot = Saved(first.name or f"value {place.index}")
                self.saved[number] = (place, slot, first, None, self._input(first))
        self.undone: dict[int, tuple[Entry, int]] = {}
        for number in list(self.saved):
            self._undo_views(number)

    def _undo_views(self, number: int) -> None:
        """The base of a saved view that rearranges a whole tensor: a transposed parameter's, for one."""
        saved = number
        while True:
            view = self.numbering.first[number]
            base = undone(view, self.copies[number])
            if base is None or (number := self.numbering.of(view.args[0])) in self.copies:
                return
            self.copies[number] = base
            self.undone[number] = base, saved

    def _input(self, entry: Entry) -> Entry:
        copy = Entry(None, spec=entry.spec)
        self.copies[self.numbering.of(entry)] = copy
        return copy

    def copy(self, wanted: Entry) -> Entry:
        """The copy of an entry and of all it needs."""
        numbering, copies, used = self.numbering, self.copies, self.used
        stack = [numbering.of(wanted)]
        while stack:
            number = stack[-1]
            used.add(number)
            if number in copies:
                stack.pop()
                continue
            entry = numbering.first[number]
            needed = [numbering.of(e) for e in (*entries_in(entry.args), *entries_in(entry.kwargs))]
            used.update(needed)
            missing = [n for n in needed if n not in copies]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            copies[number] = self._copied(entry)
        return copies[numbering.of(wanted)]

    def _copied(self, entry: Entry) -> Entry:
        if entry.constant is None and (entry.target is None or (entry.has_effect and not self._is_new(entry))):
            raise UnsupportedError(self._missing(entry))
        copy = Entry(entry.target, map_entries(entry.args, self._of), map_entries(entry.kwargs, self._of), entry.spec)
        copy.constant, copy.has_effect, copy.once = entry.constant, entry.has_effect, entry.once
        copy.origin, copy.sequence_nr, copy.recompute = entry.origin, entry.sequence_nr, entry.recompute
        # A value that only the backward reads stays there, though an earlier backward on the tape has computed it too:
        # the next derivative may need the value's operands.
        copy.is_backward = self.in_backward
        return copy

    def add_sizes(self) -> None:
        """Inputs for the sizes that are used and that no other input has: saved ones."""
        given = (value for copy in self.copies.values() for value in leaves((copy.args, copy.kwargs)))
        used = {symbol for value in given if is_symbolic(value) for symbol in symbols_in(value)}
        known = {info.symbol for info in symbols_of_inputs(self.inputs()[0], {})}
        for place, number in self.recorded.sizes:
            symbol = symbol_of(number)
            if symbol in used - known:
                known.add(symbol)
                entry = Entry(None)
                self.sizes[entry] = number
                self.sources.append((place, Saved(str(symbol)), entry, None, entry))

    def numbers(self) -> dict[Entry, Any]:
        """The symbolic numbers that copies are."""
        known = self.recorder.decisions.numbers.by_entry
        found = {
            copy: known[first]
            for number, copy in self.copies.items()
            if (first := self.numbering.first[number]) in known
        }
        return found | self.sizes

    def _of(self, entry: Entry) -> Entry:
        return self.copies[self.numbering.of(entry)]

    def _position(self, entry: Entry) -> int:
        return self.numbering.position(self.numbering.of(entry))

    def _is_new(self, entry: Entry) -> bool:
        return self._position(entry) >= self.recorded.start

    def _missing(self, entry: Entry) -> str:
        origin, name = self.recorded.origin, self.session.name
        what = "a random number"
        for known, slot in zip(origin.inputs, origin.input_slots, strict=True):
            if known is entry:
                what = f"the value of {slot}"
        return (
            f"`{name}` was differentiated with create_graph=True, or for a gradient with different metadata than its "
            f"result, and the derivative needs {what}; the partition in use does not save this. Compile with "
            "partition='default', or compute the inner gradient inside the compiled function with "
            "torch.autograd.grad(..., create_graph=True)."
        )

    def drop_unused(self, with_gradients: IdSet[torch.Tensor]) -> None:
        """Leave out inputs of the function without readers: their values may be gone at the call.

        `with_gradients`: the leaves that get one.
        """
        if not self.recorder.is_symbolic:  # their sizes may be asked for
            self.sources = [
                (place, slot, original, leaf, copy)
                for place, slot, original, leaf, copy in self.sources
                if place.kind != "input" or leaf in with_gradients or self.numbering.of(original) in self.used
            ]

    def inputs(self) -> tuple[list[Entry], list[ValueRef], list[Slot], list[Entry], list[torch.Tensor | None]]:
        """The graph's inputs: placeholders, where they are found, slots, entries on the tape, leaves."""
        used = self.used | {saved for number, (_, saved) in self.undone.items() if number in self.used}
        rows = [*self.sources, *(row for number, row in self.saved.items() if number in used)]
        return (
            [row[4] for row in rows],
            [row[0] for row in rows],
            [row[1] for row in rows],
            [row[2] for row in rows],
            [row[3] for row in rows],
        )

    def tape(self) -> tuple[Tape, list[tuple[Entry, Entry]]]:
        """The copies in the order of the tape, and the random copies with their originals."""
        tape, random = Tape(self.recorder.tape.origins), []
        for copy, _ in self.undone.values():
            tape.append(copy)
        for number in sorted(self.copies.keys() - self.undone.keys()):
            copy, first = self.copies[number], self.numbering.first[number]
            tape.append(copy)
            if copy.has_effect:
                random.append((copy, first))
        return tape, random


# -------------------------------------------------------------------- derived effects
# The effects of a capture's backwards, beyond gradients, as outputs of their graphs and fields of signatures.


def written_by(recorder: Recorder, records: Sequence[InputRecord]) -> IdSet[torch.Tensor]:
    """The inputs that the backward was found to write to: the next capture knows them from the start."""
    found: IdSet[torch.Tensor] = IdSet()
    for root in recorder.late.missing:
        record = next((r for r in records if r.initial is root), None)
        if record is None or recorder.values[record.stand_in] is not root:
            slots = [str(r.slot) for r in records if r.initial.storage is root.storage]
            what = "shares memory with another input" if record is None else "is given other memory or sizes"
            raise written_by_backward(" and ".join(slots), f"the backward of `{recorder.host.name}`", f"which {what}")
        found.add(record.real)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a graph for a run's effects, and their part of the signature."""

    entries: list[Entry]
    slots: list[Slot]
    effects: BackwardEffects
    leaves: tuple[Any, ...]  # outputs with gradients that are wrapper subclasses

    def of(self, leaves: Sequence[torch.Tensor | None], live: tuple[int, ...]) -> BackwardEffects:
        """The effects of a graph with inputs that have the `leaves`; the backward writes to the inputs `live`."""
        number = ById((leaf, i) for i, leaf in enumerate(leaves) if leaf is not None)
        given = zip(self.effects.wrapped, self.leaves, strict=True)
        wrapped = tuple(dataclasses.replace(one, input=number[leaf]) for one, leaf in given)
        return dataclasses.replace(self.effects, live=live, wrapped=wrapped)


def effects_of(recorder: Recorder, run: Run, slots: Sequence[Slot], tangents: Sequence[Slot]) -> Outputs:
    """For a backward at the end of a joint graph; `slots` are the live inputs'. `Outputs.of` has the rest."""
    entries: list[Entry] = []
    found: list[Slot] = []

    def add(entry: Entry, slot: Slot) -> int:
        for number, known in enumerate(entries):
            if known is entry:
                return number
        entries.append(entry)
        found.append(slot)
        return len(entries) - 1

    checks = tuple(check.info(lambda e, c=check: Result(add(e, Checked(c.where)))) for check in run.checks)  # type: ignore[misc]
    updates = []
    for live, tangent, entry, counted in run.updates:
        slot = Updated(tangents[tangent] if live is None else slots[live])
        updates.append(LateUpdate(add(_own_copy(recorder, entry), slot), live, tangent, counted))
    drawn = [entry for entry in recorder.tape.entries if entry.is_backward] if checks else []
    wrapped = []
    for _, of, spec, parts in run.wrapped:
        part_slots = [Part(Grad(of), path) for path in spec.paths()]
        wrapped.append(WrappedGradient(-1, spec, tuple(map(add, parts, part_slots))))
    made = tuple(updates), run.once, tuple(wrapped)
    effects = BackwardEffects(tuple(found), checks, generators_drawn_from(drawn), (), *made)
    return Outputs(entries, found, effects, tuple(leaf for leaf, *_ in run.wrapped))


def _own_copy(recorder: Recorder, entry: Entry) -> Entry:
    """The entry, or a copy where an earlier write may change its memory."""
    root = memory_root(entry)
    if root.target is not None:
        return entry
    copy = recorder.emit(aten.clone.default, entry)
    copy.is_backward = True
    return copy


def check_outputs(recorder: Recorder, run: Run, leaves: Sequence[object], paths: Sequence[str]) -> None:
    """No backward writes to the function's results."""
    where = {root.storage: place for root, place in run.written}
    for leaf, path in zip(leaves, paths, strict=True) if where else ():
        value = recorder.values.get(leaf) if isinstance(leaf, torch.Tensor) else None
        if value is not None and value.storage in where:
            why = "which the caller has by then"
            raise written_by_backward(f"memory of the output {path}", where[value.storage], why)
