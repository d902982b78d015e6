"""The results of a capture, from its run's findings: the joint graph and its further derivatives."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .._torch.wrappers import is_wrapper
from ..frontend.source import Source
from ..graph.call_effects import ChangeInference
from ..graph.effect_log import WriteWrapper, ordered
from ..graph.joint import JointGraph
from ..graph.meta import TensorSpec
from ..graph.signature import (
    BaseOf,
    EffectInfo,
    GradientInfo,
    GradientOf,
    GradientPaths,
    GraphOutputs,
    InputInfo,
    MemoryOf,
    Signature,
    SizeSymbol,
    StopInfo,
    StructureInfo,
)
from ..identity import ById, IdSet
from .aspect import CallGuard, Settled
from .derivatives.backward import Differentiated, takes_gradient
from .derivatives.derived_graph import effects_of
from .derivatives.resumable_trace import ResumableTrace, Session, read_again
from .effects.attribute_guards import check_new_leaves
from .effects.input_effects import counted_along
from .effects.outputs import attributes_set, parameters_made
from .effects.results import GraphResults, Returned
from .heap.alias import memory_root
from .heap.records import InputRecord
from .inputs.inputs import GradientSource
from .kernels.checks import may_raise
from .parts import CaptureParts
from .tape.gradient_paths import passed_through, saving_nodes
from .tape.graph import build_module
from .tape.tape import Entry
from .values.prefix import generators_drawn_from

aten = torch.ops.aten
_NOWHERE = GradientPaths(frozenset(), frozenset())
_NUMBER = TensorSpec((), (), torch.int64, torch.device("cpu"))


class Assembly(CaptureParts):
    """The parts of a run that is over, made into a graph."""

    guards: tuple[CallGuard, ...] = ()

    def separate_outputs(self, graph: GraphResults) -> None:
        """Copy an output that would share memory with an input or an output where eager's does not."""
        recorder = self.recorder
        self._take_over_gradients(graph)
        taken: set[Entry] = set()
        for one in graph:
            entry, at = one.entry, one.spec
            if not isinstance(entry.spec, TensorSpec):
                continue  # a number has no memory
            root = memory_root(entry)
            if root.value is not None and entry.spec.overlaps_itself and isinstance(at, TensorSpec):
                root = recorder.emit(aten.clone.default, root, spec=root.spec)  # a copy of the constant's whole memory
                place = [*at.shape], [*at.stride], at.offset
                one.entry = recorder.emit(aten.as_strided.default, root, *place, spec=at)
            elif root.target is None or root in taken:
                starts_late = entry.spec.offset != 0 and entry.spec.is_dense
                again = (entry,) if starts_late else (entry, entry)  # `copy` keeps strides, and the offset too
                op = aten.clone.default if starts_late else aten.copy.default
                one.entry = root = recorder.emit(op, *again, spec=at)
            taken.add(root)

    def _take_over_gradients(self, graph: GraphResults) -> None:
        """Gradients that are left in `.grad` as computed: the capture refers to their stand-ins, so autograd copies
        them, though eager's autograd would take them over.
        """
        taken = {memory_root(one.entry) for one in graph}
        for value in self.facts.gradients.values:
            index = graph.by_fake.get(value)
            one = None if index is None else graph[index]
            if one is None or one.carrier is not None or one.entry.target is not aten.copy.default:
                continue
            source = one.entry.args[1]
            root = memory_root(source)
            is_whole = one.entry.args[0] is source and source.spec == one.spec == one.entry.spec
            if is_whole and root.target is not None and root not in taken:
                taken.add(root)
                one.entry = source

    def joint(
        self, returned: Returned, described: Differentiated, stops: StopInfo, out_tree: object, results: list[object]
    ) -> tuple[list[InputRecord], JointGraph]:
        inputs, reached = self.inputs, described.reached
        differentiable, gradients = described.outputs, described.gradients
        graph, carrying = returned.graph, returned.graph.carrying_gradients()
        outputs: list[Entry | None] = [*(one.entry for one in graph), *gradients]
        for one in self.aspects:
            one.before_graph(outputs)
        records = list(inputs.records)
        live = set(self.recorder.tape.live(outputs)) if inputs.memory else set()
        shared = []
        for whole, members in inputs.memory:
            if whole.entry in live or whole.initial.storage.is_written:
                records.append(whole)
                outputs.append(None)
                shared.append((len(records) - 1, tuple(records.index(m) for m in members)))
        outputs += [None] * len(inputs.numbers)
        decisions = self.recorder.decisions
        table = decisions.numbers.table if self.symbols or decisions.sizes.made else None
        late, run = self.recorder.late, self.backward.run
        tangent_slots = [graph[i].slot for i in differentiable]
        effects = effects_of(self.recorder, run, [live.slot for live in late.live], tangent_slots)
        outputs += effects.entries
        self.recorder.forget_dead()
        module = build_module(
            self.recorder.tape,
            [*(r.entry for r in records), *(n.entry for n in inputs.numbers)],
            [*(entry for _, entry in described.tangents), *run.live],
            outputs,
            self.fake_mode,
            "JointGraph",
            table is not None,
            decisions.numbers.by_entry
            | decisions.sizes.made
            | {n.entry: n.number.plain() for n in inputs.numbers if n.type is int},
        )
        of_inputs = IdSet((*inputs.by_stand_in, *inputs.wrappers.by_stand_in))
        wrapped = [leaf for leaf in inputs.wrappers.leaves if is_wrapper(leaf)]
        check_new_leaves(self.name, results, returned.outputs, of_inputs, [one.carrier for one in graph], wrapped)
        number: dict[object, int] = {r: i for i, r in enumerate(records)}
        owners = ById((r.real, i) for i, r in enumerate(inputs.records))
        of_part = ById((r.stand_in, i) for i, r in enumerate(records))
        wrappers = len(records) + len(inputs.numbers)  # they come after the inputs
        number |= {known: wrappers + inputs.wrappers.inputs.index(known) for known in inputs.wrappers.inputs}
        shared_of = {whole: members[0] for whole, members in shared}
        passed = passed_through([carrying[i] for i in differentiable], returned.aliases(results))
        arriving = outputs[len(graph) : len(outputs) - len(effects.entries)]
        paths = (*(reached.get(r, _NOWHERE) for r in records), *[_NOWHERE] * len(inputs.numbers)) if reached else ()
        may_stop = bool(stops.decisions or stops.checks)
        settled = self._settled(returned, results, number, differentiable, passed, may_stop=may_stop)
        self.guards = tuple(guard for one in self.aspects for guard in one.guards(settled))
        in_inference = torch.is_inference_mode_enabled() and not differentiable
        signature = Signature(
            inputs=(
                *(_input_info(r, i, number, owners, shared_of) for i, r in enumerate(records)),
                *(
                    InputInfo(n.slot, n.entry.tensor or _NUMBER, False, True, n.argument, number=n.type)
                    for n in inputs.numbers
                ),
            ),
            graph_outputs=GraphOutputs(
                tuple(one.slot for one in graph),
                tuple(one.spec for one in graph),
                frozenset(i for i, one in enumerate(graph) if memory_root(one.entry) is not one.entry),
            ),
            gradients=GradientInfo(
                tuple(differentiable),
                tuple(e.tensor for _, e in described.tangents),
                tuple(e is not None for e in arriving),
                rootless=tuple(described.rootless),
                reached_from=paths,
                arrival=tuple(number[key] for key in self.backward.arrived),
                saving=self._saving([carrying[i] for i in differentiable], records),
                passed=passed[0],
                passed_aliases=passed[1],
                **inputs.wrappers.in_gradients(returned, differentiable),
                hooked_inside=tuple(self.called.inside),
            ),
            structure=StructureInfo(
                tuple(returned.outputs),
                out_tree,
                self.state.spec,
                tuple(shared),
                tuple(tuple(of_part[p] for p in known.parts) for known in inputs.wrappers.inputs),
            ),
            effects=EffectInfo(
                (
                    *(WriteWrapper(number[known], times) for known, times in inputs.wrappers.writes()),
                    *ordered(returned.log),
                ),
                (
                    *(ChangeInference(out) for out, made in returned.inference.items() if made is not in_inference),
                    *parameters_made(results, inputs.by_stand_in),
                    *attributes_set(self.name, results, settled.paths, inputs.by_stand_in),
                    *(effect for one in self.aspects for effect in one.effects(settled)),
                ),
                self.state.writes,
                counted_along(self.recorder, inputs.records, returned.log),
            ),
            stops=dataclasses.replace(
                stops, generators=self._generators(may_stop=may_stop), eager_regions=tuple(self.called.made)
            ),
            backward=effects.of([r.leaf for r in records], self._live(records) if run.live else ()),
            symbols=self._signature_symbols(records),
        )
        errors = self.backward.error, table, self.backward.failing, self.backward.raising
        return records, JointGraph(self.name, module, signature, self.fake_mode, *errors)

    def _settled(
        self,
        returned: Returned,
        results: list[object],
        number: Mapping[object, int],
        differentiable: list[int],
        passed: Any,
        *,
        may_stop: bool,
    ) -> Settled:
        """The facts for the aspects."""
        known: ById[object, object] = self.inputs.by_stand_in | self.inputs.wrappers.by_stand_in
        outputs = {differentiable[position] for position, _ in passed[0]}
        aliases = {at for at, _ in passed[1]}

        def interior(at: int) -> str:
            if at in self.called.inside:
                return "has hooks that compute with its own tensors"
            is_passed = at in aliases or getattr(returned.outputs[at], "output", None) in outputs
            return "computes further results from the tensor; their gradients flow to it inside" if is_passed else ""

        paths = [info.path for info in returned.outputs]
        return Settled(self.name, results, paths, known, number, interior, may_stop)

    def _saving(self, outputs: list[Any], records: list[InputRecord]) -> tuple[tuple[int, int], ...]:
        if self.backward.error is not None:
            return ()
        return saving_nodes(outputs, [r.leaf if takes_gradient(r) else None for r in records])

    def _live(self, records: list[InputRecord]) -> tuple[int, ...]:
        """The inputs that the backward writes to."""
        number = ById((record.stand_in, i) for i, record in enumerate(records))
        return tuple(number[live.stand_in] for live in self.recorder.late.live)

    def _generators(self, *, may_stop: bool) -> tuple[torch.Generator, ...]:
        """The generators of a call, if the call may stop, or has operators that may raise and draws on a CPU alone."""
        entries = self.recorder.tape.forward()
        found = generators_drawn_from(entries)
        if not found:
            return ()
        is_quick = all(generator.device.type == "cpu" for generator in found)
        return found if may_stop or (is_quick and any(may_raise(e.target, e.spec) for e in entries)) else ()

    def _signature_symbols(self, records: list[InputRecord]) -> tuple[SizeSymbol, ...]:
        if self.symbols is None:
            return ()
        entries = [*(r.entry for r in records), *(n.entry for n in self.inputs.numbers)]
        return self.symbols.signature({entry: i for i, entry in enumerate(entries)})

    def resumable(self, returned: Returned, records: list[InputRecord], joint: JointGraph) -> ResumableTrace:
        """The capture as it stands, to be gone on with; it holds on to no real tensor."""
        known = {id(r.real): (_reference(r), r.stand_in) for r in self.inputs.records}
        for record in self.inputs.records:  # the user's attributes on the tensors stay
            own = record.stand_in.__dict__
            for name, value in record.real.__dict__.items():
                if name in own and own[name] is value:
                    del own[name]
        differentiable, taken = joint.signature.gradients.differentiable, set(joint.inputs_taken())
        carrying = returned.graph.carrying_gradients()
        session = Session(self.name, self.recorder, self.aspects, known, has_hooks=self.lifting.has_hooks)
        return ResumableTrace(
            session,
            tuple(carrying[i] for i in differentiable),
            tuple(returned.graph[i].slot for i in differentiable),
            joint.signature.gradients.tangent_specs,
            (*(r.entry for r in records), *(n.entry for n in self.inputs.numbers)),
            (
                *(r.leaf if takes_gradient(r) and i in taken else None for i, r in enumerate(records)),
                *(None for _ in self.inputs.numbers),
            ),
            (*(r.slot for r in records), *(n.slot for n in self.inputs.numbers)),
            {e.name: e for e in self.recorder.tape.entries if e.has_effect and e.name is not None},
            read_again(self.recorder.tape) | self._names_of_numbers(),
            session.decisions.of_capture,
            made=self._made([carrying[i] for i in differentiable]),
            wrappers=self._wrapper_edges(records, taken),
        )

    def _made(self, results: Sequence[torch.Tensor]) -> dict[tuple[int, ...], Any]:
        at = ById((result, position) for position, result in enumerate(results))
        parted = [(tuple(at[p] for p in parts if p in at), w) for w, parts in self.inputs.wrappers.taken_apart]
        return {places: wrapper for places, wrapper in parted if places}

    def _wrapper_edges(self, records: list[InputRecord], taken: set[int]) -> dict[tuple[int, ...], object]:
        of_part = ById((record.stand_in, i) for i, record in enumerate(records))
        found = {tuple(of_part[p] for p in known.parts): known for known in self.inputs.wrappers.inputs}
        edges = {places: known.history[1] for places, known in found.items() if not taken.isdisjoint(places)}
        return {places: GradientEdge(node, 0) for places, node in edges.items() if node is not None}

    def _names_of_numbers(self) -> frozenset[str]:
        """The nodes of integers and of sizes that the graph finds: a derivative may compute with any."""
        sizes = self.recorder.decisions.sizes.made
        entries = [*(n.entry for n in self.inputs.numbers), *(e for e in self.recorder.tape.entries if e in sizes)]
        return frozenset(entry.name for entry in entries if entry.name is not None)


def _reference(record: InputRecord) -> Callable[[], object]:
    """A function that gives an input's tensor while the tensor lives, and does not keep it alive. For modules' tensors
    it is no weak reference: `torch.utils.swap_tensors` refuses tensors with weak references. An argument differs in
    each call.
    """
    source = record.source
    if record.argument is not None:
        return _nothing
    if isinstance(source, Source) and isinstance(source.root, torch.nn.Module):
        return source.now
    return weakref.ref(record.real)


def _nothing() -> None:
    return None


def _input_info(
    record: InputRecord,
    index: int,
    number: Mapping[object, int],
    owners: ById[torch.Tensor, int],
    shared_of: Mapping[int, int],
) -> InputInfo:
    """`number`, `owners`: inputs' numbers by record, and by real tensor."""
    source: object = record.source
    if index in shared_of:
        source = MemoryOf(shared_of[index])
    elif isinstance(source, InputRecord):
        source = BaseOf(number[source])
    elif isinstance(source, GradientSource):
        source = GradientOf(owners[source.owner])
    return InputInfo(
        slot=record.slot,
        spec=record.spec,
        requires_grad=index not in shared_of and record.real.requires_grad,
        is_leaf=record.real.is_leaf,
        argument=None if index in shared_of else record.argument,
        source=source,
    )
