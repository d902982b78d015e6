"""The joint graph of a derivative: what a backward and its own backward recorded, cut out of the tape."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from ...graph.joint import JointGraph
from ...graph.signature import DecisionInfo, GradientPaths, InputInfo, Signature
from ...graph.slots import Decision, Grad, Slot, Tangent
from ..heap.view_chain import not_own
from ..recorder.backward_writes import Run
from ..tape.gradient_paths import passed_through, reached_from, saving_nodes
from ..tape.graph import build_module
from ..tape.symbols import symbols_of_inputs
from ..tape.tape import Entry
from ..values.prefix import generators_drawn_from
from .derived import AtHand, Cut
from .derived_effects import DerivedEffects
from .resumable_trace import Derivative, GradientRef, ResumableTrace, ValueRef, read_again

__all__ = ["DerivedOutput", "RecordedBackward", "derivative_of"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DerivedOutput:
    """One value that the derivative gives; its spec is `SPARSE` where it is sparse."""

    fake: torch.Tensor
    entry: Entry
    spec: Any
    slot: Slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBackward:
    """What running the backward of `origin`, and then the backward of that, left on the tape.

    The backward's entries start at `start`, those of its own backward at `middle`. `given` are the positions of the
    outputs with a tangent, `tangents` the fakes and entries of those. Of the `outputs`, `sources` have a history that
    leads to a variable, and take the tangents `seeds`; `rootless` ones require grad and lead to none. `variables` are
    the tensors that the derivative can be differentiated by, `second` the entries of the gradients. `valued` are the
    inputs whose own value is at hand, `saved` and `sizes` the other values, `results` those that are outputs of the
    function. `done` and `second_done` are the effects of both backwards, `error` what the second one raised, and
    `raised` the same by output. `made` are gradients that are wrapper subclasses, and where their plain tensors are.
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
    error: Exception | None
    raised: dict[int, Exception]
    versions: Any
    made: list[tuple[Any, list[ValueRef]]]


class _Graph:
    """The entries of the derivative's graph: copies of the part of the tape that it takes."""

    def __init__(self, recorded: RecordedBackward) -> None:
        self.recorded = recorded
        origin, session = recorded.origin, recorded.origin.session
        self.session, self.numbering, recorder = session, session.numbering, session.recorder
        self.effects = DerivedEffects(
            recorder,
            recorded.done,
            recorded.second_done,
            [Tangent(origin.output_slots[i]) for i in recorded.given],
            [Tangent(output.slot) for output in recorded.sources],
        )
        self.numbering.extend()
        gradient_of = dict(zip(map(id, recorded.variables), recorded.second, strict=True))
        outputs = [(i, id(origin.outputs[i])) for i in recorded.results]
        results = [i for i, key in outputs if gradient_of[key] is not None or key in self.effects.later.leaves]
        self.cut = cut = Cut(self._at_hand(results), recorded.seeds)
        self.decided = session.decisions.made
        ends = (
            *(output.entry for output in recorded.outputs),
            *(decided.entry for decided in self.decided),
            *self.effects.own.entries,
        )
        self.entries = [cut.copy(entry) for entry in ends]
        drawn = [entry for entry in recorder.tape.entries[recorded.start :] if entry.has_effect]
        for entry in drawn:
            if self.numbering.position(self.numbering.of(entry)) < recorded.middle:
                cut.copy(entry)
        cut.in_backward = True
        gradients = [None if (e := gradient_of[id(v)]) is None else cut.copy(e) for v in recorded.variables]
        self.late = [cut.copy(entry) for entry in self.effects.later.entries]
        for entry in drawn:
            cut.copy(entry)
        with_gradients = {identity for identity, entry in gradient_of.items() if entry is not None}
        cut.drop_unused(with_gradients.union(self.effects.later.leaves))
        cut.add_sizes()
        self.inputs, self.feeds, self.slots, self.originals, self.leaves = cut.inputs()
        copy_of: dict[int, Entry | None] = dict(zip(map(id, recorded.variables), gradients, strict=True))
        self.returned = [copy_of.get(id(leaf)) if leaf is not None else None for leaf in self.leaves]
        self.tape, self.random_originals = cut.tape()
        self.numbers = cut.numbers()

    def _at_hand(self, results: list[int]) -> AtHand:
        recorded = self.recorded
        return AtHand(
            recorded.origin,
            recorded.start,
            results=results,
            sinks=recorded.sinks,
            valued=recorded.valued,
            tangents=list(zip(recorded.given, recorded.tangents, strict=True)),
            live=recorded.done.live,
            late=recorded.second_done.live,
            saved=recorded.saved,
            sizes=recorded.sizes,
        )

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
        recorded, own, decided = self.recorded, self.effects.own, self.decided
        outputs, sources = recorded.outputs, recorded.sources
        fakes = [output.fake for output in sources]
        may_stop = bool(decided or own.effects.checks)
        drawn = [original for _, original in self.random_originals] if may_stop else []
        return Signature(
            inputs=tuple(
                InputInfo(slot, entry.spec, leaf is not None, False)  # type: ignore[arg-type]
                for slot, entry, leaf in zip(self.slots, self.inputs, self.leaves, strict=True)
            ),
            graph_outputs=(*(o.slot for o in outputs), *(Decision(d.where) for d in decided), *own.slots),
            graph_output_specs=(*(o.spec for o in outputs), *(e.spec for e in self.entries[len(outputs) :])),  # type: ignore[arg-type]
            differentiable=self.differentiable,
            rootless=tuple(outputs.index(output) for output in recorded.rootless),
            tangent_specs=tuple(entry.spec for entry in recorded.seeds),  # type: ignore[misc]
            gradients=tuple(entry is not None for entry in self.returned),
            runtime_views=not_own(self.entries),
            outputs=(),
            output_spec=None,
            reached_from=_reached(fakes, self.leaves),
            symbols=symbols_of_inputs(self.inputs, self.numbers),
            decisions=tuple(
                DecisionInfo(len(outputs) + i, d.value, d.where, d.is_tensor) for i, d in enumerate(decided)
            ),
            generators=generators_drawn_from(drawn),
            saving=saving_nodes(fakes, self.leaves),
            passed=passed_through(fakes)[0],
            **self.effects.fields(
                len(outputs) + len(decided), self.feeds, self.leaves, recorded.given, has_late=bool(sources)
            ),
        )

    @property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, output in enumerate(self.recorded.outputs) if output in self.recorded.sources)

    def resumable(self, signature: Signature) -> ResumableTrace:
        """What the next derivative starts from."""
        recorded, session = self.recorded, self.session
        outputs = [recorded.outputs[i] for i in self.differentiable]
        feeds = enumerate(self.feeds)
        return ResumableTrace(
            session,
            tuple(output.fake for output in outputs),
            tuple(output.slot for output in outputs),
            signature.tangent_specs,
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
        """The gradients that are wrapper subclasses, by where their plain tensors are among those differentiable."""
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
        recorded.error,
        symbols=recorder.decisions.numbers.table,
        raising=recorded.raised,
    )
    resumable = graph.resumable(signature)
    return Derivative(joint, resumable, tuple(graph.feeds), tuple(gradients), tuple(stops), whole)


def _reached(fakes: list[torch.Tensor], leaves: list[torch.Tensor | None]) -> tuple[GradientPaths, ...]:
    """For each input the outputs that lead to it, where there are several."""
    if len(fakes) < 2 or any(fake.grad_fn is None for fake in fakes):
        return ()
    return tuple(reached_from(fakes, leaves))
