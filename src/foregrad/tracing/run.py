"""One run of a function on fakes, in named stages: called, analyzed, differentiated, captured; and its result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from .._torch.dispatch import (
    force_view_tracking,
    no_saved_tensors_hooks,
    symbolic_composites,
)
from .._torch.patches import patched
from .._torch.transforms import levels_put_back
from ..errors import ForegradError
from ..frontend.lifted import capturing
from ..frontend.program_state import ProgramState
from ..frontend.reads import FoundWrappers, Reads, Source
from ..frontend.tree import Tree
from ..graph.effects import CheckFailed
from ..graph.joint import JointGraph
from ..interrupts import is_interrupt, note_escaping
from .assembly import Assembly
from .derivatives.backward import Differentiated, differentiate
from .derivatives.derived_effects import check_outputs, written_by
from .derivatives.resumable_trace import ResumableTrace
from .derivatives.session import fresh_autocast_cache
from .effects.analysis import Analysis
from .effects.given import Given
from .effects.input_effects import check_marked, check_sizes, views_of_written
from .effects.outputs import analyze
from .effects.python_in_backwards import check_module_hooks
from .effects.python_state import PythonState
from .effects.side_effects import (
    check_arrays,
    check_generators,
    check_gradients,
    check_results,
    check_run,
    check_tensors,
)
from .inputs.views_by_place import check_reshaped
from .kernels.checks import dead_checks
from .parts import run_function
from .tape.tape import CaptureAgain
from .values.draw_patches import drawing
from .values.draws import Draws, DrawsFound
from .values.numbers import trace_math

_OF_FOREGRAD = (ForegradError, CaptureAgain, CheckFailed, DrawsFound)


class CaptureRun(Assembly):
    """One run of the function."""

    def run(self, lifted: list[tuple[torch.Tensor, Source]]) -> Captured | None:
        """The captured function; None: capture again with what was learned, such as common bases (see `Learned`)."""
        self.imports.import_ahead()
        what = "self" if isinstance(self.call.function, torch.nn.Module) else self.name
        classes = [(kind, kind.__name__) for kind in self.call.tree.types()]
        leaves_named = zip(self.call.leaves, self.call.paths, strict=True)
        state = ProgramState([(self.call.function, what), *leaves_named, *classes])
        self.inputs.sources.state = state
        with self.unrecorded:
            leaves = self.inputs.add_arguments(self.recorder, lifted)
        self.draws = Draws(self.name, self.call, lambda value: self.state.before.knows(value))
        given = Given(self.call, leaves, functools.partial(self.inputs.arguments, self.draws.arrays_of(leaves)))
        state.walk(given.named)
        containers = self.learned.containers
        self.state = PythonState(self.call, self.name, state, self.reads, self.inputs.real_of, containers, given)
        captured, is_kept = None, False
        try:
            captured = self._run(given)
        except BaseException as error:
            is_kept = is_interrupt(error) and not isinstance(error, _OF_FOREGRAD)
            is_stumble = not is_kept and self.state.stumbled(is_foreign=not isinstance(error, _OF_FOREGRAD))
            if is_stumble or self.functions.isolate(error) | self.eager_hooks.isolate(error):
                raise CaptureAgain from None
            if isinstance(error, RuntimeError):
                self.history_changes.look_again()
            raise
        finally:
            if captured is None:
                self.state.give_up(is_interrupted=is_kept)
                if not is_kept:
                    self.observed.give_up()
            self.reads.release()
        return captured

    def _run(self, given: Given) -> Captured | None:
        self.code.check(self.state.before)
        with (
            patched(self),
            self.settings.view_replay,
            force_view_tracking(self.learned.replays_views),
            no_saved_tensors_hooks(),  # those around the call are for what the compiled function saves
            fresh_autocast_cache(),
            symbolic_composites(self.call.may_have_symbolic_sizes),
            self.code.rebound,
        ):
            called = self._called(given)
            if called is None:
                return None
            with self.unrecorded:
                result = self._checked(given, *called)
                if result is None:
                    return None
                out_leaves, paths, out_tree = result
                analysis = self._analyzed(out_leaves, paths)
                described = self._differentiated(analysis, out_leaves, paths)
                if described is None:
                    return None
        self.lifting.values_asked.raise_failed()  # by a hook, in the backward
        self.functions.check_absent(self.name, len(described.tangents))
        with self.unrecorded:
            check_gradients(self.name, self.inputs.records, self.lifting.accumulated_at)
            late = check_sizes(analysis, described.gradients)
            check_marked(analysis)
            return self._captured(analysis, dataclasses.replace(described, late=late), out_leaves, out_tree)

    def _called(self, given: Given) -> tuple[Any] | None:
        """Run the function: what it returns."""
        recorder, call = self.recorder, self.call
        trace_math()
        self.state.put_stand_ins(recorder.where)
        with self.settings.put_back(), self.imports.watched(), levels_put_back(), self.lifting, recorder:
            try:
                for tensor in self.state.before.with_attributes():  # so that they are guarded
                    if tensor not in self.inputs.by_real:
                        self.inputs.adopt(tensor)
                with self.options.around(), capturing(), drawing(self.draws):
                    result = run_function(self.observed.of(call.function), given.args, given.kwargs)
            except Exception as error:
                note_escaping(error)
                if self.learned.replays_views and recorder.changes.resized:
                    self.learned.replays_views = False
                    return None
                raise
            finally:
                self.state.take_stand_ins()
                self.code.rebound.unbind()
                self.origins.forget()
                recorder.decisions.raise_failed()
                self.lifting.values_asked.raise_failed()
                self.state.raise_failed()
                self.observed.raise_failed()
        return None if self.state.needs_another_run() else (result,)

    def _checked(self, given: Given, result: Any) -> tuple[list[Any], list[str], Tree] | None:
        """The leaves of what the function returned and of what it wrote to Python's state, and their paths."""
        recorder, inputs, call = self.recorder, self.inputs, self.call
        with recorder:
            recorder.collectives.finish()
            self.overlapping.finish()
        self.draws.check()
        inputs.check_reached(compares_identity=False)
        check_run(self.name, call, (given.args, given.kwargs), given.leaves, inputs.wrappers.unwrap)
        self.regions.check()
        self.observed.check(self.state.made.newborns)
        needed = views_of_written(inputs.memory, recorder)
        if not needed <= inputs.shared_bases:
            inputs.shared_bases.update(needed)
            return None
        self.history_changes.check_views()
        changed = recorder.writes.follows_strides() or recorder.changes.resized_with_gradients()
        if self.learned.replays_views and changed and any(r.stand_in.requires_grad for r in inputs.records):
            self.learned.replays_views = False
            return None
        gradients = self.facts.gradients.finish()
        return self.state.outputs(result, inputs.wrappers.of_results(result, inputs.adopt), gradients)

    def _analyzed(self, out_leaves: list[Any], paths: list[str]) -> Analysis:
        """How each written input and each output is given back."""
        recorder, inputs = self.recorder, self.inputs
        check_tensors(self.name, inputs.records, self.facts, self.lifting.accumulated_at)
        check_arrays(self.name, self.call, inputs.records, self.state.before.met())
        check_results(self.name, out_leaves, paths, inputs.by_stand_in, self.made_generators, self.lifting.classes)
        check_reshaped(recorder)
        analysis = analyze(recorder, inputs, out_leaves, paths)
        self.hooks.settle(self.name, self.call.function, out_leaves, analysis, inputs, live=self.options.live_hooks)
        self.lifting.settle(has_hooks=bool(self.hooks))
        return analysis

    def _differentiated(self, analysis: Analysis, out_leaves: list[Any], paths: list[str]) -> Differentiated | None:
        """The backward, run on fakes; None: capture again, with what it was found to write to."""
        recorder, records, backward = self.recorder, self.inputs.records, self.backward
        with_history = [fake for fake in analysis.fakes if fake is not None]
        if with_history:
            check_module_hooks(self.name, self.code.modules, self.state.knows)
        keep = self.options.higher_order
        described = self.observed.of(differentiate)(backward, analysis, keep=keep)
        self.observed.raise_failed()
        self.observed.check(self.state.made.newborns)
        self.inputs.wrappers.check_gradients()
        if with_history:
            self.hooks.check_nodes(self.name)
        if recorder.late.missing:
            self.learned.late.update(written_by(recorder, records))
            return None
        check_outputs(recorder, backward.run, out_leaves, paths)
        if backward.error is not None:
            reached = described.reached or backward.reached(with_history, least=1)
            described = dataclasses.replace(described, reached=reached)
            backward.forget_unreached(reached)
        described = described.parted(backward, analysis)
        if self.inner.was_asked and backward.error is None:
            outputs = {i: analysis.fakes[i] for i in described.outputs}
            backward.on_dead_ends(outputs, [fake for fake, _ in described.tangents])
        return described

    def _captured(
        self, analysis: Analysis, described: Differentiated, out_leaves: list[Any], out_tree: Tree
    ) -> Captured:
        """The joint graph, and what goes with it."""
        recorder, inputs = self.recorder, self.inputs
        self.separate_outputs(analysis)
        recorder.decisions.numbers.decide_fixed()
        analysis.add_decisions(recorder.decisions.made)
        dead = dead_checks(recorder.tape, [*analysis.entries, *described.gradients], len(recorder.decisions.made))
        analysis.add_checks([*recorder.checks.made, *dead], inputs.records)
        settings = self.settings.after, self.settings.inside
        records, joint = self.joint(analysis, described, out_tree, out_leaves, settings)
        self.checkpoints.check({records[u.input].entry: str(records[u.input].slot) for u in joint.signature.updates})
        tensors = [r.real for r in inputs.records] + [None] * (len(joint.signature.inputs) - len(inputs.records))
        self.state.settle()
        observed = self.observed
        scan = self.code.scan(observed.ran, observed.entered, observed.called, self.facts.gradients.hooks)
        if "Generator" in scan.names:
            check_generators(self.name, self.made_generators)
        inputs.check_reached(compares_identity=self.reads.compares_identity)
        recorder.borrowed.check(self.name, self.reads)
        self.state.check_taken_over(self.name)
        higher = bool(described.outputs) and self.options.higher_order
        again = self.resumable(analysis, records, joint) if higher else None
        facts = self.facts.of(len(joint.signature.inputs), scan)
        found = self.reads, facts, again, inputs.wrappers.found(self.call.tree), self.state.reached()
        return Captured(joint, tuple(tensors), tuple(self.code.modules), *found)


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """What a capture gives: the joint graph, the real tensors behind its inputs (None for whole memories), the modules
    whose code ran, what the function read besides tensors, what it asked of which input (an expression, its value),
    what it takes to differentiate it again, the wrapper subclasses that it was given, and, by class, the ids of objects
    that it reaches by itself, which its arguments must not be.
    """

    joint: JointGraph
    tensors: tuple[torch.Tensor | None, ...]
    modules: tuple[torch.nn.Module, ...]
    reads: Reads
    facts: tuple[tuple[int, str, str | None, Any], ...] = ()
    resumable: ResumableTrace | None = None
    wrappers: FoundWrappers | None = None
    reached: Mapping[type, frozenset[int]] = dataclasses.field(default_factory=dict)
