"""Capture: one run of a function on fakes gives its joint graph; called, analyzed, differentiated, captured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch.engine import force_view_tracking, no_saved_tensors_hooks, symbolic_composites
from .._torch.patches import outside, patched
from .._torch.symbols import is_ragged
from .._torch.tensors import gradient_of, is_usable
from .._torch.versions import warn_if_untested
from .._torch.wrappers import is_of_capture
from ..errors import ForegradError, InternalError, UnsupportedError, UnsupportedSideEffectError, UnsupportedTensorError
from ..frontend.arrays import tensor_over
from ..frontend.call import FlatCall, are_apart
from ..frontend.openings import FoundOpenings, Unwrap
from ..frontend.source import Source
from ..frontend.state import of_python
from ..frontend.tree import Tree, flatten
from ..graph.attempts import attempts
from ..graph.effect_log import CheckFailed
from ..graph.joint import JointGraph
from ..graph.signature import StopInfo
from ..identity import IdSet
from ..interrupts import held, is_interrupt, note_escaping
from ..locks import bound
from .aspect import CallGuard, Finished
from .assembly import Assembly
from .derivatives.backward import Differentiated, differentiate
from .derivatives.derived_graph import check_outputs, written_by
from .derivatives.resumable_trace import ResumableTrace, fresh_autocast_cache
from .effects.attribute_guards import Facts
from .effects.input_effects import check_sizes, views_of_written
from .effects.outputs import place_results
from .effects.results import Returned
from .heap.records import InputRecord
from .kernels.checks import in_order
from .parts import Options, run_function
from .tape.again import AdditionsFound, ArgumentsFound, CaptureAgain, NumberVaries, SharedClosureFound
from .tape.collection import paused_collection
from .tape.tape import Learned
from .values.numbers import trace_math

_MOST_RUNS = 1000  # each learns of one more tensor, or of none
_OF_FOREGRAD = (ForegradError, CaptureAgain, CheckFailed, ArgumentsFound)


class CaptureRun(Assembly):
    """One run of the function."""

    def run(self, lifted: list[tuple[torch.Tensor, Source]]) -> Captured | None:
        """The captured function; None: capture again with the learned facts, common bases for one (see `Learned`)."""
        for one in self.aspects:
            one.prepare()
        what = "self" if isinstance(self.call.function, torch.nn.Module) else self.name
        classes = [(kind, kind.__name__) for kind in self.call.tree.types()]
        leaves_named = zip(self.call.leaves, self.call.paths, strict=True)
        roots = [(self.call.function, what), *leaves_named, *classes]
        is_whole, self.learned.walks_all = self.learned.walks_all, True
        state = self.python.ProgramState(roots, is_whole=is_whole)
        self.inputs.sources.state = state
        if state.names("functional_call"):  # it looks its tensors up
            self.inputs.meet_again()
        with self.unrecorded:
            leaves = self.inputs.add_arguments(self.recorder, lifted)
        self.draws = self.python.Draws(self.name, self.call, self.met)
        arguments = functools.partial(self.inputs.arguments, self.draws.arrays_of(leaves))
        given = self.python.RunArguments(self.call, leaves, arguments)
        state.walk(given.named)
        known = state, self.reads, self.inputs.real_of, self.learned, given, self.observed
        self.state = self.python.PythonState(self.call, self.name, *known)
        captured, is_kept = None, False
        try:
            captured = self._run(given)
        except BaseException as error:
            is_foreign, is_sudden = not isinstance(error, _OF_FOREGRAD), is_interrupt(error)
            is_kept = is_foreign and error is held.raised
            is_stumble = not is_sudden and self.state.stumbled(is_foreign=is_foreign)
            # Where it looks for an argument, it may have found no stand-in.
            is_again = is_sudden or isinstance(error, CaptureAgain)
            is_stumble = is_stumble or (not is_again and self.inputs.meets_again())
            is_stumble = is_stumble or (not is_again and not is_foreign and state.is_partial)
            if isinstance(error, UnsupportedError) and self.inputs.apart:
                is_stumble = self.learned.together = True
            asked = [] if is_stumble else [one.failed(error) for one in self.aspects]  # all of them learn
            if is_stumble or any(asked):
                raise CaptureAgain from None
            raise
        finally:
            if captured is None:
                self.state.give_up(is_interrupted=is_kept)
                if not is_kept:
                    self.observed.give_up()
            self.reads.release()
        return captured

    def _run(self, given: object) -> Captured | None:
        self.code.check(self.state.before)
        with (
            patched(self),
            self.aspects.around(lambda one: one.around_run()),
            force_view_tracking(),
            no_saved_tensors_hooks(),  # the hooks around the call are for the tensors that the compiled function saves
            fresh_autocast_cache(),
            symbolic_composites(self.call.may_have_symbolic_sizes),
            self.code.rebound,
        ):
            try:
                called = self._called(given)
            except Exception as error:
                if not is_interrupt(error):
                    self._check_places()
                raise
            if called is None:
                return None
            with self.unrecorded:
                result = self._checked(given, *called)
                if result is None:
                    return None
                out_leaves, paths, out_tree = result
                returned = self._analyzed(out_leaves, paths)
                described = self._differentiated(returned, out_leaves, paths)
                if described is None:
                    return None
        self._raise_caught()  # by a hook, in the backward
        self.called.check_absent(len(described.tangents))
        with self.unrecorded:
            _check_gradients(self.name, self.inputs.records, self.lifting.accumulated_at)
            check_sizes(self.recorder, self.inputs.records, returned.graph, described.gradients)
            return self._captured(returned, described, out_leaves, out_tree)

    def _handlers(self) -> contextlib.AbstractContextManager[None]:
        """Context: handlers of signals are no code of the program, see `OwnWrites.of_handler`."""

        @contextlib.contextmanager
        def aside() -> Iterator[None]:
            self.pause()
            try:
                with outside(), self.unrecorded, self.state.own.of_handler():
                    yield
            finally:
                self.observed.go_on()

        is_main = threading.current_thread() is threading.main_thread()  # it alone runs handlers
        return bound(held, "aside", aside) if is_main else contextlib.nullcontext()

    def _called(self, given: Any) -> tuple[object] | None:
        """Run the function and return its result."""
        recorder, call = self.recorder, self.call
        trace_math()
        self.state.own.begin()
        self.state.put_stand_ins(recorder.where)
        with self.aspects.around(lambda one: one.around_function()), self.lifting, recorder:
            try:
                for tensor in self.state.before.with_attributes():  # so that they are guarded
                    if tensor not in self.inputs.by_real:
                        self.inputs.adopt(tensor)
                with self.options.around(), self.python.capturing(), self.python.drawing(self.draws), self._handlers():
                    result = run_function(self.observed.of(call.function), given.args, given.kwargs)
            except Exception as error:
                note_escaping(error)
                raise
            finally:
                self.state.take_stand_ins()
                self.code.rebound.unbind()
                self.origins.forget()
                recorder.decisions.raise_failed()
                self._raise_caught()
                self.state.raise_failed()
                self.observed.raise_failed()
        return None if self.state.needs_another_run() else (result,)

    def _checked(self, given: Any, result: object) -> tuple[list[object], list[str], Tree] | None:
        """The leaves of the function's result and of its writes to Python's state, and their paths."""
        recorder, inputs, call = self.recorder, self.inputs, self.call
        with recorder:
            for one in self.aspects:
                one.ran()
        self.draws.check()
        self._check_places()
        inputs.check_reached(compares_identity=False)
        _check_run(self.name, call, (given.args, given.kwargs), given.leaves, inputs.wrappers.unwrap)
        self.observed.check(self.state.made.newborns)
        needed = views_of_written(inputs.memory, recorder)
        if not needed <= inputs.shared_bases:
            inputs.shared_bases.update(needed)
            return None
        gradients = self.facts.gradients.finish()
        return self.state.outputs(result, inputs.wrappers.of_results(result, inputs.adopt), gradients)

    def _raise_caught(self) -> None:
        for one in self.aspects:
            one.raise_caught()

    def _check_places(self) -> None:
        """Raise where views are to autograd other views than their places in memory are."""
        self.inputs.check_overlapping()
        self.recorder.changes.check_places()

    def _analyzed(self, out_leaves: list[object], paths: list[str]) -> Returned:
        """How each written input and each output is given back."""
        recorder, inputs = self.recorder, self.inputs
        _check_tensors(self.name, inputs.records, self.facts, self.lifting.accumulated_at)
        _check_arrays(self.name, self.call, inputs.records, self.state.before.met())
        _check_results(self.name, out_leaves, paths, inputs.by_stand_in)
        for one in self.aspects:
            one.returned(out_leaves, paths)
        returned = place_results(recorder, inputs, out_leaves, paths)
        self.lifting.settle(has_hooks=self.called.settle(out_leaves, returned))
        return returned

    def _differentiated(self, returned: Returned, out_leaves: list[object], paths: list[str]) -> Differentiated | None:
        """The backward, run on fakes; None: capture again, with the writes found."""
        recorder, records, backward = self.recorder, self.inputs.records, self.backward
        with_history, keep = [*returned.graph.carrying_gradients().values()], self.options.higher_order
        described: Differentiated = self.observed.of(differentiate)(backward, returned.graph, keep=keep)
        self.observed.raise_failed()
        self.observed.check(self.state.made.newborns)
        self.inputs.wrappers.check_gradients()
        if with_history:
            self.called.after_backward()
        if recorder.late.missing:
            self.learned.late.update(written_by(recorder, records))
            return None
        check_outputs(recorder, backward.run, out_leaves, paths)
        if backward.error is not None:
            reached = described.reached or backward.reached(with_history, least=1)
            described = dataclasses.replace(described, reached=reached)
            backward.forget_unreached(reached)
        described = described.parted(backward, returned)
        if self.inner.was_asked and backward.error is None:
            outputs = {i: returned.graph[i].carrier for i in described.outputs}
            backward.on_dead_ends(outputs, [fake for fake, _ in described.tangents])
        return described

    def _captured(
        self, returned: Returned, described: Differentiated, out_leaves: list[object], out_tree: Tree
    ) -> Captured:
        """The joint graph and its companions."""
        recorder, inputs = self.recorder, self.inputs
        self.separate_outputs(returned.graph)
        recorder.decisions.numbers.decide_fixed()
        decisions = returned.graph.decisions(recorder.decisions.made)
        outputs = [*(one.entry for one in returned.graph), *described.gradients]
        checks = in_order(recorder.checks.made, recorder.tape, outputs, len(recorder.decisions.made))
        stops = StopInfo(decisions, returned.graph.checks(checks, inputs.records))
        records, joint = self.joint(returned, described, stops, out_tree, out_leaves)
        tensors = [r.real for r in inputs.records] + [None] * (len(joint.signature.inputs) - len(inputs.records))
        self.state.settle()
        observed = self.observed
        scan = self.code.scan(observed.ran, observed.entered, observed.called, self.facts.gradients.hooks)
        self.state.own.guard_what_was_read(self.reads)
        for one in self.aspects:
            one.finished(Finished(joint, records, scan.names))
        inputs.check_apart(joint.signature)
        inputs.check_reached(compares_identity=self.reads.compares_identity)
        higher = bool(described.outputs) and self.options.higher_order
        again = self.resumable(returned, records, joint) if higher else None
        facts = self.facts.of(len(joint.signature.inputs), scan.names, makes_up_names=scan.makes_up_names)
        found = self.reads, facts, again, inputs.wrappers.found(self.call.tree), self.state.reached()
        return Captured(joint, tuple(tensors), tuple(self.code.modules), *found, self.guards)


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """A capture's results: the joint graph, the real tensors behind its inputs (None for whole memories), the modules
    with code that ran, the function's reads besides tensors, its questions about inputs (an expression, its value), the
    trace for further derivatives, the wrapper subclasses in the call, and, by class, the ids of objects that the
    function reaches by itself and that its arguments must not be.
    """

    joint: JointGraph
    tensors: tuple[torch.Tensor | None, ...]
    modules: tuple[torch.nn.Module, ...]
    reads: Any  # `Reads`
    facts: tuple[tuple[int, str, str | None, Any], ...] = ()
    resumable: ResumableTrace | None = None
    wrappers: FoundOpenings | None = None
    reached: Mapping[type, frozenset[int]] = dataclasses.field(default_factory=dict)
    guards: tuple[CallGuard, ...] = ()


def capture_call(
    call: FlatCall, options: Options | None = None, *, lifted: Sequence[tuple[torch.Tensor, Source]] = ()
) -> Captured:
    """Run `call` once on fakes. `lifted` tensors become inputs ahead of the arguments, whether used or not.

    Where it raises, everything is as it was before.

    Raises `Unsupported...Error` for a call that can't be captured, and the function's own errors on its arguments.
    """
    warn_if_untested()
    options, lifted, learned = options or Options(), list(lifted), Learned()
    with attempts().in_one_call():
        for _ in range(_MOST_RUNS):
            run = CaptureRun(call, options, learned)
            attempts().begin()
            try:
                with held, paused_collection():
                    captured = run.run(lifted)
            except (NumberVaries, AdditionsFound):
                raise  # a capture does not decide whether numbers may be symbolic, or arguments unread
            except CaptureAgain as found:
                lifted += found.found if isinstance(found, SharedClosureFound) else ()
                captured = None
            finally:
                _take_apart(run)
            if captured is not None:
                return captured
    raise InternalError(
        f"capturing `{options.name}` came to no end: each run found tensors in memory that inputs share"
    )


def _take_apart(run: CaptureRun) -> None:
    """The parts of a run refer to each other: they go now, and the arguments too."""
    state, recorder = getattr(run, "state", None), run.recorder
    parts: list[object] = [run, run.inputs, run.facts, run.observed, *(() if state is None else (state.before, state))]
    if recorder.host is run:  # nothing goes on with it
        for value in recorder.values.values():
            value.forget_memory()
        parts.append(recorder)
    for part in parts:
        vars(part).clear()


# -------------------------------------------------------------------- side effects
# Side effects of a function that a compiled call would not repeat: found after its run, and refused.


def _check_run(
    name: str, call: FlatCall, arguments: tuple[object, object], leaves: list[object], unwrap: Unwrap
) -> None:
    """A run left the containers among its arguments as they were, where no write to them is an effect of the call."""
    if call.objects:
        return
    after, tree = flatten(arguments, unwrap)
    if tree != call.tree or any(a is not b for a, b in zip(after, leaves, strict=True)):
        of_python().refuse_change(name, "a container among its arguments")


def _check_tensors(name: str, records: list[InputRecord], facts: Facts, accumulated_at: str) -> None:
    """Nothing was hung onto a tensor among the inputs, its gradient included."""
    attribute = facts.attribute_set()
    if attribute is not None:
        raise of_python().attribute_set_error(name, attribute)
    _check_gradients(name, records, accumulated_at)
    for wrapper in facts.inputs.wrappers.inputs:
        if wrapper.is_given_gradient():
            raise _written_gradient(name, wrapper.slot, accumulated_at)


def _check_gradients(name: str, records: list[InputRecord], where: str) -> None:
    """`.grad` of no input was written to. `where`: the line that last did so to some tensor, if one did."""
    for record in records:
        for stand_in in (record.stand_in, record.leaf):
            if stand_in is not None and is_usable(stand_in) and stand_in.is_leaf and stand_in.grad is not None:
                stand_in.grad = None
                raise _written_gradient(name, record.slot, where, goes_on=not record.real.is_leaf)


def _written_gradient(name: str, slot: object, where: str, *, goes_on: bool = False) -> UnsupportedSideEffectError:
    if goes_on:
        return UnsupportedSideEffectError(
            f"`backward()` in `{name}`{' at ' + where if where else ''} reaches the graph of {slot} before the call; "
            "no graph can. Compute this inside, or run it outside (`.detach().requires_grad_()` ends gradients)."
        )
    return UnsupportedSideEffectError(
        f"`{name}` writes to `.grad` of {slot}{(' at ' + where if where else '')}; a compiled call can't repeat "
        "this. Use torch.autograd.grad, or do it outside."
    )


def _check_arrays(name: str, call: FlatCall, records: list[InputRecord], met: Iterable[object]) -> None:
    """No written tensor is over the memory of an array that the function reaches by itself: the array's reads happen
    before the graph runs.
    """
    written = [r for r in records if not r.real.is_inference() and r.stand_in._version != r.start_version]
    arrays = [over for value in met if (over := tensor_over(value)) is not None] if written else []
    own = IdSet(call.leaves[leaf] for leaf in call.arrays())
    for record in written:
        if record.real not in own and not all(are_apart([array], [record.real]) for array in arrays):
            raise UnsupportedSideEffectError(
                f"`{name}` writes to {record.slot}, and reads a NumPy array that shares its memory. The compiled call "
                "would read the old values. Use the tensor alone, or a copy."
            )


def _check_results(name: str, results: Sequence[Any], paths: Sequence[str], known: Container[Any]) -> None:
    """No result but an input (one among those `known`) has a `.grad`, is a generator that the function made, or a
    number that has no value.
    """
    for result, path in zip(results, paths, strict=True):
        if is_ragged(result):
            raise UnsupportedTensorError(
                f"`{name}` returns the size of a ragged dimension, {path}, a symbol of its offsets without a value. "
                "Return the tensor."
            )
        if isinstance(result, torch.nn.Module) and any(map(is_of_capture, _tensors_of(result))):
            raise UnsupportedSideEffectError(
                f"`{name}` returns a module that it makes, {path}: each compiled call would return an equal module "
                "without values. Make it outside."
            )
        if is_of_capture(result) and result not in known and gradient_of(result) is not None:
            raise UnsupportedSideEffectError(
                f"`{name}` sets `.grad` of the result {path}; a compiled call would not. Set it outside."
            )


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        own = object.__getattribute__(part, "__dict__")
        for table in (own.get("_parameters", {}), own.get("_buffers", {}), own):
            yield from (value for value in table.values() if isinstance(value, torch.Tensor))
