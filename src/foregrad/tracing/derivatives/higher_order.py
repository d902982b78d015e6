"""Differentiating a captured function once more: the capture goes on where it stopped.

The fakes that a capture ran on keep their autograd history, so the backward of a backward needs no second run of the
user's function: eager's own engine is run over the fakes with `create_graph`, the recorder still writing to the same
tape. Whatever eager differentiates, stops at (detach, no_grad) or refuses is thereby treated as eager does, at any
order. The new graph starts from the values that the graph before it saves, matched by value number: it computes
nothing again that was kept, and draws no random number a second time.

Known weakness: a value that neither was saved nor can be computed from what was is refused by name. That takes a
partitioner that saves other values than those which the operators' derivatives read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.graphs import symbol_of
from ...errors import ForegradError, UnsupportedError
from ...graph.joint import JointGraph
from ...graph.meta import TensorSpec
from ...graph.signature import DecisionInfo, InputInfo, Reach, Signature
from ...graph.slots import Decision, Grad, Slot, Tangent
from ...graph.tangents import CONSTANT, STOP, VARIABLE
from ..heap.view_chain import not_own
from ..recorder.backward_writes import Run
from ..tape.gradient_paths import cut_at, other_leaves, passed_through, reached_from, saving_nodes
from ..tape.graph import build_module
from ..tape.symbols import symbols_of_inputs
from ..tape.tape import Entry
from ..values.decisions import generators_drawn_from
from .dead_ends import errors_behind, raise_behind
from .derivable import Derivable, Derivative, ValueRef, read_again
from .derived import AtHand, Cut
from .derived_effects import DerivedEffects
from .session import run_engine

__all__ = ["Differentiation"]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Output:
    fake: torch.Tensor
    entry: Entry
    spec: TensorSpec
    slot: Slot


class Differentiation:
    """The work of making the backward of `origin`: `run` gives it, for tangents of `pattern` (see `graph.tangents`).

    It gives the gradients of the inputs in `wanted` (None: all). Without `create_graph` it has no backward itself.
    `forward` is the function's forward graph and `saved` the nodes of it that are saved (None: given up since),
    among them the differentiable outputs at positions `results`; inputs at `written` are saved as copies of what
    they were.
    `at_hand`: the values in `saved` and the tangents (None: absent) of the call that this is made for, from which
    comes what the derivative's own operators read of values.
    Raises `UnsupportedError` for a value that is not at hand any more, and what eager raises for a derivative
    that does not exist.
    """

    def __init__(
        self,
        origin: Derivable,
        forward: fx.GraphModule,
        saved: Sequence[fx.Node | None],
        results: Sequence[int],
        written: frozenset[int],
        pattern: tuple[int, ...],
        wanted: Collection[int] | None = None,
        at_hand: Callable[[], tuple[Sequence[Any], Sequence[Any]]] = lambda: ((), ()),
        *,
        create_graph: bool = True,
    ) -> None:
        self.values = at_hand
        self.create_graph = create_graph
        self.origin, self.session, self.recorder = origin, origin.session, origin.session.recorder
        self.given = [i for i, kind in enumerate(pattern) if kind in (CONSTANT, VARIABLE)]
        self.stops = [i for i, kind in enumerate(pattern) if kind == STOP]
        self.pattern = pattern
        self.sinks = [i for i, leaf in enumerate(origin.leaves) if leaf is not None]
        self.wanted = [i for i in self.sinks if wanted is None or i in wanted]
        self.results = [] if origin.session.has_hooks else list(results)
        self.start = len(self.recorder.tape.entries)
        self.middle = self.start
        self.backward_error: Exception | None = None
        self.rootless: list[_Output] = []  # that require grad, though no gradient goes from them to an input
        self.raised: dict[int, Exception] = {}  # by output, what its backward raises on a way to no input
        self.run_done, self.second_done = Run(), Run()  # what the backward did, and the backward of that
        self.outputs: list[_Output] = []
        self.sizes: list[tuple[ValueRef, Any]] = []  # saved symbolic sizes
        self._find_saved(forward, saved, written)

    def _find_saved(self, forward: fx.GraphModule, saved: Sequence[fx.Node | None], written: frozenset[int]) -> None:
        """The value number of each saved value, and which inputs are at hand with their values."""
        numbering = self.session.numbering
        numbering.extend()
        numbers = numbering.of_nodes(forward, self.origin.inputs, self.origin.random)
        positions = {node: i for i, node in enumerate(n for n in forward.graph.nodes if n.op == "placeholder")}
        self.numbers_saved = [None if node is None else numbers.get(node) for node in saved]
        self.saved: list[tuple[ValueRef, int]] = []
        self.valued: set[int] = set()  # inputs whose own value was kept
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
        with self.session.decisions.deriving(self.origin.known, self._at_hand):
            return self._run()

    def _at_hand(self) -> dict[int, Any]:
        """The real values of this call by value number."""
        numbering = self.session.numbering
        saved, tangents = self.values()
        found = {n: v for n, v in zip(self.numbers_saved, saved, strict=True) if n is not None and v is not None}
        for (_, entry), position in zip(self.tangents, self.given, strict=True):
            found[numbering.of(entry)] = tangents[position]
        return found

    def _run(self) -> Derivative:
        origin, session, given = self.origin, self.session, self.given
        stops = [origin.outputs[i] for i in self.stops]
        leaves: list[Any] = [*(origin.leaves[i] for i in self.wanted), *stops]
        self.tangents = [
            session.tangent(origin.tangent_specs[i], requires_grad=self.pattern[i] == VARIABLE) for i in given
        ]
        fakes = [fake for fake, _ in self.tangents]
        outputs, late = [origin.outputs[i] for i in given], self.recorder.late
        late.restore(origin.versions)
        is_whole = session.has_hooks and len(self.wanted) == len(self.sinks)
        others = other_leaves(outputs, leaves) if is_whole else []  # hooks of these run, too
        with session.recording(fakes), cut_at([*self._variables()[: len(self.sinks)], *stops]):
            found = run_engine(outputs, [*leaves, *others], fakes, create_graph=self.create_graph)
        gradients = self._results(found)
        self.run_done = late.finish(restore=False)
        self.versions = late.versions()
        sources = [output for output in self.outputs if output.fake.requires_grad]
        self._check_stops(sources)
        seeds = [session.tangent(output.spec) for output in sources]
        self.middle = len(self.recorder.tape.entries)  # where the backward of the backward starts on the tape
        second = self._second(sources, self._variables(), [fake for fake, _ in seeds])
        if self.backward_error is None:
            self._find_errors(sources, [fake for fake, _ in seeds], leads_somewhere=any(second))
            if not any(second):
                self.rootless, sources, seeds = sources, [], []
        return self._derivative(gradients, sources, [entry for _, entry in seeds], second)

    def _check_stops(self, sources: list[_Output]) -> None:
        """Raise where a gradient depends on an output that it was asked by, whose history is not kept."""
        stops = [i for i in self.stops if i not in self.results]
        reached = reached_from([output.fake for output in sources], [self.origin.outputs[i] for i in stops])
        for i, reach in zip(stops, reached, strict=True):
            if reach.outputs:
                raise UnsupportedError(
                    f"a gradient of `{self.session.name}` by its result {self.origin.output_slots[i]}, or one that "
                    "passes a hook on that, is to be differentiated again, and depends on that result, which the "
                    "backward does not keep. Compile what comes before it and what comes after it as two functions."
                )

    def _results(self, found: Sequence[torch.Tensor | None]) -> list[ValueRef | None]:
        """Where the gradients of inputs, and of outputs that are stopped at, are; those that are no tangent become
        outputs.
        """
        known = {id(fake): ValueRef("tangent", i) for (fake, _), i in zip(self.tangents, self.given, strict=True)}
        inputs = len(self.origin.inputs)
        gradients: list[ValueRef | None] = [None] * (inputs + len(self.stops))
        slots = [*self.origin.input_slots, *(self.origin.output_slots[i] for i in self.stops)]
        for position, fake in zip([*self.wanted, *range(inputs, len(gradients))], found, strict=False):
            if fake is None:
                continue
            if id(fake) not in known:
                value = self.recorder.value_of(fake)
                entry = value.read(self.recorder.emit)
                known[id(fake)] = ValueRef("output", len(self.outputs))
                self.outputs.append(_Output(fake, entry, value.spec, Grad(slots[position])))
            gradients[position] = known[id(fake)]
        return gradients

    def _second(self, sources: list[_Output], variables: list[Any], seeds: list[torch.Tensor]) -> list[Entry | None]:
        """For each variable the entry of its gradient, or None."""
        if not sources or not variables:
            return [None] * len(variables)
        try:
            with self.session.recording(seeds), cut_at(variables):
                found = run_engine([output.fake for output in sources], variables, seeds, create_graph=False)
        except ForegradError:
            raise
        except RuntimeError as error:
            self.backward_error = error
            return [None] * len(variables)
        recorder = self.recorder
        read = [None if g is None else recorder.value_of(g).read(recorder.emit) for g in found]
        self.second_done = recorder.late.finish(restore=False)
        return read

    def _find_errors(self, sources: list[_Output], seeds: list[torch.Tensor], *, leads_somewhere: bool) -> None:
        """What eager raises on ways that lead to no input, as after `once_differentiable`."""
        fakes = [output.fake for output in sources]
        looked_at = raise_behind(fakes) if leads_somewhere else [*range(len(fakes))]

        @contextlib.contextmanager
        def recording() -> Iterator[None]:
            with self.session.recording():
                yield
            self.recorder.late.finish(restore=False)

        picked = [fakes[i] for i in looked_at], [seeds[i] for i in looked_at]
        errors = errors_behind(*picked, self._variables(), recording)
        self.raised = {self.outputs.index(sources[looked_at[i]]): error for i, error in errors.items()}

    # ---------------------------------------------------------------- the graph

    def _derivative(
        self,
        gradients: list[ValueRef | None],
        sources: list[_Output],
        seeds: list[Entry],
        second: list[Entry | None],
    ) -> Derivative:
        origin, session, numbering = self.origin, self.session, self.session.numbering
        effects = DerivedEffects(
            self.recorder,
            self.run_done,
            self.second_done,
            [Tangent(origin.output_slots[i]) for i in self.given],
            [Tangent(output.slot) for output in sources],
        )
        numbering.extend()
        read = dict(zip(map(id, self._variables()), second, strict=True))
        self.results = [i for i in self.results if read[id(origin.outputs[i])] is not None]
        second = [read[id(variable)] for variable in self._variables()]
        cut = Cut(self._available(), seeds)
        outputs, decided = self.outputs, session.decisions.made
        wanted = (*(output.entry for output in outputs), *(d.entry for d in decided), *effects.own.entries)
        entries = [cut.copy(entry) for entry in wanted]
        drawn = [entry for entry in self.recorder.tape.entries[self.start :] if entry.has_effect]
        for entry in drawn:
            if numbering.position(numbering.of(entry)) < self.middle:
                cut.copy(entry)
        cut.in_backward = True
        second_copies = [None if e is None else cut.copy(e) for e in second]
        late_copies = [cut.copy(entry) for entry in effects.later.entries]
        for entry in drawn:
            cut.copy(entry)
        cut.drop_unused({id(variable) for variable in self._variables() if read[id(variable)] is not None})
        cut.add_sizes()
        inputs, feeds, slots, originals, leaves = cut.inputs()
        of_variable: dict[int, Entry | None] = dict(zip((id(v) for v in self._variables()), second_copies, strict=True))
        returned = [of_variable.get(id(leaf)) if leaf is not None else None for leaf in leaves]
        tape, random_originals = cut.tape()
        recorder, numbers = self.recorder, cut.numbers()
        module = build_module(
            tape,
            inputs,
            [*cut.seeds, *cut.late],
            [*entries, *returned, *late_copies],
            recorder.fake_mode,
            "JointGraph",
            recorder.is_symbolic,
            numbers,
        )
        differentiable = tuple(i for i, output in enumerate(self.outputs) if output in sources)
        may_stop = bool(decided or effects.own.effects.checks)
        random = {copy.name: original for copy, original in random_originals if copy.name is not None}
        signature = Signature(
            inputs=tuple(
                InputInfo(slot, entry.spec, leaf is not None, False)  # type: ignore[arg-type]
                for slot, entry, leaf in zip(slots, inputs, leaves, strict=True)
            ),
            graph_outputs=(*(o.slot for o in outputs), *(Decision(d.where) for d in decided), *effects.own.slots),
            graph_output_specs=(*(o.spec for o in outputs), *(e.spec for e in entries[len(outputs) :])),  # type: ignore[arg-type]
            differentiable=differentiable,
            rootless=tuple(self.outputs.index(output) for output in self.rootless),
            tangent_specs=tuple(entry.spec for entry in seeds),  # type: ignore[misc]
            gradients=tuple(entry is not None for entry in returned),
            runtime_views=not_own(entries),
            metadata_writes=(),
            outputs=(),
            output_spec=None,
            reached_from=self._reached(sources, leaves),
            symbols=symbols_of_inputs(inputs, numbers),
            decisions=tuple(
                DecisionInfo(len(outputs) + i, d.value, d.where, d.is_tensor) for i, d in enumerate(decided)
            ),
            generators=generators_drawn_from([original for _, original in random_originals] if may_stop else []),
            saving=saving_nodes([output.fake for output in sources], leaves),
            passed=passed_through([output.fake for output in sources])[0],
            **effects.fields(len(outputs) + len(decided), feeds, self.given, has_late=bool(sources)),
        )
        name = f"backward of {session.name}" if not _is_gradient(origin) else session.name
        table = recorder.decisions.numbers.table
        mode, error = recorder.fake_mode, self.backward_error
        joint = JointGraph(name, module, signature, mode, error, symbols=table, raising=self.raised)
        derivable = Derivable(
            session,
            tuple(outputs[i].fake for i in differentiable),
            tuple(outputs[i].slot for i in differentiable),
            signature.tangent_specs,
            tuple(originals),
            tuple(leaves),
            tuple(slots),
            random,
            read_again(tape),
            session.decisions.now_known(),
            frozenset(i for i, place in enumerate(feeds) if place.kind == "input" and place.index not in self.valued),
            self.versions,
        )
        inputs_of = len(origin.inputs)
        return Derivative(
            joint, derivable, tuple(feeds), tuple(gradients[:inputs_of]), stops=tuple(gradients[inputs_of:])
        )

    def _available(self) -> AtHand:
        return AtHand(
            self.origin,
            self.start,
            results=self.results,
            sinks=self.sinks,
            valued=self.valued,
            tangents=list(zip(self.given, self.tangents, strict=True)),
            live=self.run_done.live,
            late=self.second_done.live,
            saved=self.saved,
            sizes=self.sizes,
        )

    def _reached(self, sources: list[_Output], leaves: list[torch.Tensor | None]) -> tuple[Reach, ...]:
        """For each input the outputs that lead to it, where there are several."""
        fakes = [output.fake for output in sources]
        if len(fakes) < 2 or any(fake.grad_fn is None for fake in fakes):
            return ()
        return tuple(reached_from(fakes, leaves))

    def _variables(self) -> list[torch.Tensor]:
        origin = self.origin
        leaves: list[Any] = [origin.leaves[i] for i in self.sinks]
        tangents = [fake for fake, _ in self.tangents if fake.requires_grad]
        return [*leaves, *tangents, *(origin.outputs[i] for i in self.results)]


def _is_gradient(origin: Derivable) -> bool:
    return any(isinstance(slot, Grad) for slot in origin.output_slots)
