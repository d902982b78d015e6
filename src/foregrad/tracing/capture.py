"""Capture: one run of a function on fakes gives its joint graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._torch.asked import ViewReplay
from .._torch.dispatch import (
    force_view_tracking,
    no_saved_tensors_hooks,
    symbolic_composites,
)
from .._torch.generators import MadeGenerators
from .._torch.patches import Hooks, patched
from .._torch.plain_attributes import MADE_UP
from .._torch.plain_types import PlainTypes
from .._torch.settings import apply_settings, settings
from ..errors import ForegradError, InternalError, ProgramOutputError
from ..frontend.call import FlatCall
from ..frontend.classes import functions_held_by
from ..frontend.lifted import capturing
from ..frontend.reads import Reads
from ..frontend.scan import Scan
from ..frontend.sources import Source
from ..frontend.tree import check_leaves, flatten
from ..graph.eager_regions import begin, in_one_call
from ..graph.effects import CheckFailed
from ..graph.joint import JointGraph
from ..interrupts import held, is_interrupt, note_escaping, runs_user_code
from .assembly import Assembly
from .derivatives.backward import Backward, InnerGradients, takes_gradient
from .derivatives.derived_effects import check_outputs, written_by
from .derivatives.resumable_trace import ResumableTrace
from .derivatives.session import fresh_autocast_cache, make_tangent
from .effects.analysis import Analysis
from .effects.attribute_guards import Facts
from .effects.eager_regions import EagerRegions
from .effects.outputs import analyze
from .effects.python_state import PythonState
from .effects.result_hooks import OwnHooks
from .effects.side_effects import (
    check_escaped_tensors,
    check_finished,
    check_generators,
    check_gradients,
    check_results,
    check_run,
    check_tensors,
)
from .effects.storage_swap import check_marked, check_overlapping, check_sizes, views_of_written
from .heap.event_log import Happened
from .inputs.again import CaptureAgain, SharedClosureFound
from .inputs.escaped_tensors import EscapedTensors
from .inputs.history_changes import HistoryChanges
from .inputs.inplace_views import check_reshaped, reshape_view
from .inputs.inputs import Inputs
from .inputs.lifting import Lifting
from .kernels.dead_checks import dead_checks
from .options import Learned, Options
from .recorder.checkpoint_regions import Regions
from .recorder.recorder import Recorder
from .tape.collection import paused_collection
from .tape.origin import Origins, user_line
from .tape.symbols import fake_mode_of, symbols_of
from .tape.tape import Entry
from .values.decisions import Decisions
from .values.draws import Draws, DrawsFound, drawing
from .values.numbers import Numbers
from .values.prefix import generators_drawn_from
from .values.sizes import OpenSizes

__all__ = ["Captured", "capture_call"]

_OF_FOREGRAD = (ForegradError, CaptureAgain, CheckFailed, DrawsFound)
_REPLAY = "view replay"  # a setting of which a capture has its own
_MOST_RUNS = 1000  # each learns of one more tensor, or of none


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """What a capture gives: the joint graph, the real tensors behind its inputs (None for whole memories), the
    modules whose code ran, what the function read besides tensors, what it asked of which input (as an expression of
    that, with its value), and what it takes to differentiate it again.
    """

    joint: JointGraph
    tensors: tuple[torch.Tensor | None, ...]
    modules: tuple[torch.nn.Module, ...]
    reads: Reads
    facts: tuple[tuple[int, str, str | None, Any], ...] = ()
    resumable: ResumableTrace | None = None


def capture_call(
    call: FlatCall,
    *,
    name: str = "function",
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    lifted: Sequence[tuple[torch.Tensor, Source]] = (),
    higher_order: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    live_hooks: bool = False,
    keeps_effects_of_errors: bool = False,
    refuses_output: bool = False,
    runs_regions: bool = True,
) -> Captured:
    """Run `call` once on fakes. `lifted` tensors become inputs ahead of the arguments, whether used or not.

    `higher_order`: keep what it takes to differentiate the function again. `around`: makes a context for each run of
    the function. `live_hooks`: hooks may stay Python functions that each call puts on its results.
    `refuses_output`: raise before the function prints or logs; `runs_regions`: not before it calls an eager region.
    `keeps_effects_of_errors`: what the function changed before it raised an error of its own stays, as in eager; else
    everything is as it was.

    Raises `Unsupported...Error` for what can't be captured, and whatever the function raises on such arguments.
    """
    lifted, learned = list(lifted), Learned()
    flags = live_hooks, keeps_effects_of_errors, refuses_output, runs_regions
    options = Options(name, decompositions or {}, higher_order, around, *flags)
    with in_one_call():
        for _ in range(_MOST_RUNS):
            run = _Capture(call, options, learned)
            begin()
            try:
                with held, paused_collection():
                    captured = run.run(lifted)
            except CaptureAgain as found:
                if isinstance(found, SharedClosureFound) and found.source is not None:
                    lifted.append((found.tensor, found.source))
                captured = None
            if captured is None:
                continue
            vars(
                run
            ).clear()  # its parts refer to it: they go now, and the arguments with them, not when next looked for
            return captured
    raise InternalError(f"capturing `{name}` came to no end: each run found tensors in memory that inputs share")


class _Capture:
    """One run of the function."""

    def __init__(self, call: FlatCall, options: Options, learned: Learned) -> None:
        self.call, self.options, self.learned, self.name = call, options, learned, options.name
        self.symbols = symbols_of(call)
        self.fake_mode = fake_mode_of(call, self.symbols)
        self.inputs = Inputs(
            call,
            self.fake_mode,
            shared_bases=learned.shared_bases,
            whole=learned.whole,
            viewed=learned.viewed,
            symbols=self.symbols,
        )
        self.origins = Origins(_run_function.__code__)
        self.recorder = Recorder(self.fake_mode, self.origins, self.inputs.adopt, options.decompositions)
        self.recorder.writes.past_the_edges = self.inputs.whole_memory_needed
        self.recorder.changes.on_resize = self._on_resize
        self.history_changes = HistoryChanges(self.inputs, self.recorder)
        self.reads = self.inputs.reads
        self.recorder.late.name, self.recorder.late.ids = self.name, learned.late
        self.scan = Scan(self.reads)
        self.recorder.decisions = Decisions(self.recorder.tape, self.inputs.real_behind, call.varied)
        self.recorder.decisions.check_before(self.recorder.checks)
        table = self.symbols.table if self.symbols else None
        numbers = self.recorder.decisions.numbers = Numbers(self.recorder, table)
        self.recorder.decisions.sizes = OpenSizes(numbers, call.sizes, always=call.every_size)
        self.escaped_tensors = EscapedTensors(self.reads)
        self.modules: dict[int, torch.nn.Module] = {}
        self.told_of: dict[int, Any] = {}  # functions that modules hold
        self.checkpoints = Regions(self.recorder)
        self.lifting = Lifting(
            self.inputs.adopt,
            self._on_mark,
            self._on_detach,
            self.recorder.taken_as_data,
            self.recorder.replaced_by,
            lambda: user_line(self.origins.here()),
            self.recorder.decisions.numbers.ours,
        )
        self.inner = InnerGradients(self.inputs, self.recorder, self.name)
        self.made_generators = MadeGenerators(lambda: generators_drawn_from(self.recorder.tape.entries))
        self.settings: dict[str, Any] = {}
        self.settings_inside: dict[str, Any] = {}
        self.view_replay = ViewReplay()
        self.hooks = OwnHooks(lambda: user_line(self.origins.here()))
        self.lifting.on_hook = self.hooks.note
        self.lifting.on_gradient = self.inner.note
        self.lifting.on_numpy = self._on_numpy
        self.lifting.on_check = self.recorder.checks.note
        self.facts = Facts(self.inputs, lambda: user_line(self.origins.here()))
        self.lifting.ask = self.facts.ask
        self.types = PlainTypes(self.facts.table)
        self.lifting.views_by_strides = not learned.replays_views
        self.lifting.reshape_view = functools.partial(reshape_view, self.recorder, self.inputs)
        self.backward = Backward(self.recorder, self.lifting, self.inputs)
        self.regions = EagerRegions(self.name, self.recorder, self.lifting, lambda: self.state, self.inputs.records)

    def run(self, lifted: list[tuple[torch.Tensor, Source]]) -> Captured | None:
        """The captured function; None: capture again, with common bases (see `Inputs`) or with views that autograd does
        not replay: it replays the operator that made them, not the changes of their sizes since.
        """
        self.state = PythonState(self.call, self.name, self.reads, self.inputs.real_of, self.learned.containers)
        self.draws = Draws(self.name, self.call.function, self.state.before.knows)
        self.inputs.source_in_state = self.state.before.source_of
        captured, is_kept = None, False
        try:
            captured = self._run(lifted)
        except BaseException as error:
            if self.state.stumbled(is_foreign=not isinstance(error, _OF_FOREGRAD) and not is_interrupt(error)):
                raise CaptureAgain from None
            if isinstance(error, RuntimeError):
                self.history_changes.look_again_after(error)
            is_kept = not isinstance(error, _OF_FOREGRAD) and (
                self.options.keeps_effects_of_errors or is_interrupt(error)
            )
            raise
        finally:
            if captured is None and not is_kept:
                self.state.give_up()
            looked_at, written = self.escaped_tensors.take_back(self.inputs.real_of)
            if looked_at:
                self.state.give_up()
        if captured is not None:
            check_escaped_tensors(self.name, looked_at, written)
        return captured

    def _run(self, lifted: list[tuple[torch.Tensor, Source]]) -> Captured | None:
        recorder, inputs, call = self.recorder, self.inputs, self.call
        leaves = inputs.add_arguments(recorder, lifted)
        args, kwargs = call.arguments(leaves)
        self._scan_roots()  # before the function can change them
        hooks = Hooks(
            self._enter,
            self._leave,
            self.lifting.swap,
            self.checkpoints,
            self.reads.note,
            self.facts.missing,
            self.lifting.in_engine,
            self.reads.note_scripted,
            self.made_generators,
            self._refuse_output if self.options.refuses_output else None,
            self.hooks.on_node,
            self.lifting.storages.as_tensor,
            self.regions.call if self.options.runs_regions else self.regions.refuse,
            self.learned.regions.__contains__,
        )
        with (
            patched(hooks),
            self.view_replay,
            force_view_tracking(self.learned.replays_views),
            no_saved_tensors_hooks(),  # those around the call are for what the compiled function saves
            fresh_autocast_cache(),
            symbolic_composites(recorder.is_symbolic),
            self.types,
        ):
            self._tell_plain_types(self.scan)
            for module, _ in list(self.scan.modules.values()):
                self._tell_of_functions(module)
            self.state.put_stand_ins()
            with self._settings_put_back(), self.lifting, recorder:
                try:
                    with self.options.around(), capturing(), drawing(self.draws):
                        result = _run_function(call.function, args, kwargs)
                except Exception as error:
                    note_escaping(error)
                    if self.learned.replays_views and recorder.changes.resized:
                        self.learned.replays_views = False
                        return None
                    recorder.detached.explain(error)
                    raise
                finally:
                    self.state.take_stand_ins()
                    self.types.unbind()
                    self.origins.forget()
                    recorder.decisions.raise_failed()
                    self.lifting.values_asked.raise_failed()
            if self.state.needs_another_run():
                return None
            self.draws.check()
            check_run(self.name, call, (args, kwargs), leaves, self.reads)
            self.regions.check()
            needed = views_of_written(inputs.memory, recorder)
            if not needed <= inputs.shared_bases:
                inputs.shared_bases |= needed
                return None
            self.history_changes.check_no_grad_views()
            changed = recorder.writes.follows_strides() or recorder.changes.resized_with_gradients()
            if self.learned.replays_views and changed and any(r.stand_in.requires_grad for r in inputs.records):
                self.learned.replays_views = False
                return None
            out_leaves, out_tree = flatten(result)
            paths = out_tree.paths("out")
            check_leaves(out_leaves, paths, "output")
            written, written_paths = self.state.outputs(result)
            out_leaves, paths = [*out_leaves, *written], [*paths, *written_paths]
            check_tensors(self.name, inputs.records, self.facts, self.lifting.accumulated_at)
            check_results(self.name, out_leaves, paths, inputs.by_stand_in, self.made_generators)
            if "Generator" in self.scan.names:
                check_generators(self.name, self.made_generators)
            check_reshaped(recorder)
            check_overlapping(recorder, inputs.records)
            analysis = analyze(recorder, inputs, out_leaves, paths)
            self.hooks.settle(
                self.name, call.function, out_leaves, analysis, inputs.by_stand_in, live=self.options.live_hooks
            )
            self.lifting.has_hooks = bool(self.hooks)
            rootless: list[int] = []
            differentiable = analysis.carrying_gradients()
            with_history = [fake for fake in analysis.fakes if fake is not None]
            self.lifting.views.check_outputs([*with_history, *(alias for _, alias in analysis.aliases)])
            tangents = [make_tangent(recorder, analysis.specs[i]) for i in differentiable]
            reached = self.backward.reached(with_history)
            gradients = self._backward(analysis, differentiable, [fake for fake, _ in tangents])
            if with_history:
                self.hooks.check_nodes(self.name)
            if recorder.late.missing:
                recorder.late.ids |= written_by(recorder, inputs.records)
                return None
            check_outputs(recorder, self.backward.run, out_leaves, paths)
            if not reached and self.backward.error is not None:
                reached = self.backward.reached(with_history, least=1)
            if self.backward.error is not None and not any(reach.outputs for reach in reached.values()):
                self.backward.error = None  # it is for those to see that what raises leads to
            nowhere = self.backward.leading_nowhere(differentiable, gradients, reached, tangents)
            if nowhere:
                self.backward.to_nowhere({i: analysis.fakes[i] for i in nowhere}, list(nowhere.values()))
                rootless = list(nowhere)
                tangents = [t for i, t in zip(differentiable, tangents, strict=True) if i not in nowhere]
                kept = [k for k, i in enumerate(differentiable) if i not in nowhere]
                self.backward.run.keep_tangents(kept)
                reached = {key: reach.of_outputs(kept) for key, reach in reached.items()} if len(kept) > 1 else {}
                differentiable = [differentiable[k] for k in kept]
            if self.inner.was_asked and self.backward.error is None:
                self.backward.on_dead_ends(
                    {i: analysis.fakes[i] for i in differentiable}, [fake for fake, _ in tangents]
                )
        self.lifting.values_asked.raise_failed()  # by a hook, in the backward
        check_gradients(self.name, inputs.records, self.lifting.accumulated_at)
        check_sizes(recorder, analysis, inputs.records, gradients)
        check_marked(recorder, analysis, inputs.records)
        parts = self.inner, self.lifting, self.hooks, self.made_generators.used(), self.state, self.regions.made
        assembly = Assembly(self.name, self.fake_mode, self.symbols, inputs, recorder, self.backward, *parts)
        assembly.separate_outputs(analysis)
        recorder.decisions.numbers.decide_fixed()
        analysis.add_decisions(recorder.decisions.made)
        dead = dead_checks(recorder.tape, [*analysis.entries, *gradients], len(recorder.decisions.made))
        analysis.add_checks([*recorder.checks.made, *dead], inputs.records)
        described = analysis, differentiable, rootless, tangents, gradients, reached
        records, joint = assembly.joint(*described, out_tree, out_leaves, (self.settings, self.settings_inside))
        self.checkpoints.check(
            {id(records[u.input].entry): str(records[u.input].slot) for u in joint.signature.updates}
        )
        tensors = [r.real for r in inputs.records] + [None] * (len(joint.signature.inputs) - len(inputs.records))
        self.state.settle()
        self._scan_what_ran()
        self.state.check_taken_over(self.name)
        resumable = (
            assembly.resumable(analysis, records, joint) if differentiable and self.options.higher_order else None
        )
        self.facts.attributes(None if self.scan.makes_up_names else self.scan.names)
        number = {id(record): index for index, record in enumerate(records)}
        facts = [
            (number[id(record)], question, attribute, value)
            for (_, question, attribute), (record, value) in self.facts.made.items()
            if id(record) in number
        ]
        return Captured(joint, tuple(tensors), tuple(self.modules.values()), self.reads, tuple(facts), resumable)

    @contextlib.contextmanager
    def _settings_put_back(self) -> Iterator[None]:
        """Context: what the function sets for what comes after it is noted, and put back: each call sets it."""
        before, was_inference = settings(), torch.is_inference_mode_enabled()
        self.recorder.arithmetic.begin(before, getattr(self.call.function, "settings_between", ()))
        try:
            yield
        except (CaptureAgain, ForegradError):  # the function runs again, or in eager
            apply_settings(before)
            raise
        finally:
            self.recorder.arithmetic.end()
        now, known = settings() | {_REPLAY: self.view_replay.now}, getattr(self.call.function, "settings", ())
        before |= {_REPLAY: self.view_replay.before}
        self.settings = {name: value for name, value in now.items() if value != before[name] or name in known}
        self.settings_inside = self.recorder.arithmetic.inside(before, known)
        apply_settings({name: before[name] for name in self.settings if name != _REPLAY})
        check_finished(self.name, was_inference)
        if "the default dtype" in self.settings:
            self.recorder.arithmetic.refuse_dtype()  # of operators before it nothing is known

    # ---------------------------------------------------------------- while the function runs

    def _enter(self, module: torch.nn.Module) -> None:
        self.modules[id(module)] = module
        self.escaped_tensors.enter(module)
        self.types.module(type(module))
        self._tell_of_functions(module)
        self.origins.enter(self.scan.module_names.get(id(module)) or type(module).__name__, type(module).__qualname__)

    def _tell_of_functions(self, module: torch.nn.Module) -> None:
        """The same for functions that a module holds, and for what they call: whether they run is not known."""
        for function in functions_held_by(module):
            if id(function) not in self.told_of:
                self.told_of[id(function)] = function
                scan = Scan(Reads())
                scan.function(function, function.__name__)
                scan.finish()
                self._tell_plain_types(scan)

    def _tell_plain_types(self, scan: Scan) -> None:
        """Code that was found so far, and asks for the type of a stand-in, is told that of a tensor."""
        for namespace, loaded in scan.loads:
            self.types.loaded(namespace, loaded)
        if scan.asks_for_class:
            self.types.asks_for_class()
        self.types.named(scan.names)
        if scan.makes_up_names or not scan.names.isdisjoint({"setattr", "delattr"}):
            self.types.named(MADE_UP)

    def _refuse_output(self, what: str) -> None:
        raise ProgramOutputError(
            f"`{self.name}` {what}, which a compiled call would not repeat. Do it outside the compiled function."
        )

    def _leave(self) -> None:
        self.origins.leave()

    def _on_mark(self, tensor: torch.Tensor, requires_grad: bool) -> None:
        value = self.recorder.values.get(id(tensor))
        if value is not None:  # no transform's own
            what = Happened.MARKED if requires_grad else Happened.UNMARKED
            self.recorder.changes.log.note(what, tensor, value, None, (tensor.requires_grad,))
        self.history_changes.on_mark(tensor)

    def _on_detach(self, tensor: torch.Tensor) -> None:
        self.history_changes.on_detach(tensor)
        self.recorder.detached.note(tensor)

    def _on_numpy(self, function: Any) -> None:
        """A custom Function hands tensors to NumPy: it runs as an eager region from now on."""
        self.learned.regions.add(function)
        raise CaptureAgain

    def _on_resize(self) -> None:
        """A tensor's sizes change in place: what it is by then is no longer what its views were taken of."""
        if self.learned.replays_views and self.recorder.changes.resized_with_gradients():
            self.learned.replays_views = False
            raise CaptureAgain

    # ---------------------------------------------------------------- what it reads besides tensors

    def _scan_roots(self) -> None:
        self.scan.visit(self.call.function, self.name)
        for leaf, path in zip(self.call.leaves, self.call.paths, strict=True):
            self.scan.visit(leaf, path)
        for kind in self.call.tree.types():
            self.scan.visit(kind, kind.__name__)
        self.scan.finish()
        for module, _ in self.scan.modules.values():
            self.escaped_tensors.enter(module)

    def _scan_what_ran(self) -> None:
        """The code behind the attributes that were read on modules; names for the modules."""
        reads, scan = self.reads, self.scan
        for cls, name in list(reads.class_attributes):
            scan.attribute_of_class(cls, name)
        reads.name_modules(scan.module_names)
        for value, name in reads.objects_of_modules():
            scan.visit(value, name)
        scan.finish()

    # ---------------------------------------------------------------- afterwards

    def _backward(
        self, analysis: Analysis, differentiable: list[int], tangents: list[torch.Tensor]
    ) -> list[Entry | None]:
        """An entry, or None, for each input's gradient."""
        records = self.inputs.records
        sinks = [r for r in records if takes_gradient(r)]
        if not differentiable or not sinks:
            return [None] * len(records)
        outputs = [analysis.fakes[i] for i in differentiable]
        gradients = self.backward.gradients(outputs, sinks, tangents, keep=self.options.higher_order)
        return [gradients.get(id(r)) for r in records]


@runs_user_code
def _run_function(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # The frame of this function ends the user's part of a stack trace.
    return function(*args, **kwargs)
