"""Running eager's engine over a capture's record: the gradients of outputs, and the engine's errors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ..._torch.engine import disable_autocast, without_anomaly_mode
from ..._torch.histories import have_hooks, lead_to, nodes_behind, noting_arrival
from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import is_usable, is_view
from ..._torch.wrappers import is_wrapper, parts_of
from ...errors import ForegradError, UnsupportedError, first_line, without_frames
from ...frontend.openings import opener
from ...graph.call_effects import KeepApart
from ...graph.signature import GradientPaths
from ...identity import ById
from ..aspect import Aspect, Row, Settled
from ..effects.results import GraphResults, Returned
from ..heap.metadata_changes import keeps_history
from ..heap.records import InputRecord, is_no_grad_view
from ..heap.refusals import in_some_backwards
from ..inputs.inputs import Inputs
from ..inputs.lifting import Lifting
from ..recorder.backward_writes import Run
from ..recorder.recorder import Recorder
from ..tape.gradient_paths import other_leaves, reached_from
from ..tape.origin import user_line
from ..tape.tape import Entry
from .resumable_trace import make_tangent, run_engine


def takes_gradient(record: InputRecord) -> bool:
    """Whether gradients arrive at an input by itself, not through the tensor that it is a view of."""
    leaf = record.leaf
    if leaf is None or not leaf.requires_grad or not is_usable(leaf):
        return False
    # A view of a view made under no_grad has a history that ends there.
    return leaf.is_leaf or (is_view(leaf) and leaf is record.stand_in and not keeps_history(leaf))


def _run_backward(outputs: Any, leaves: Any, tangents: Any, *, keep: bool) -> Any:
    """`torch.autograd.grad`; autocast belongs to the forward: eager's backward usually runs outside its region."""
    with disable_autocast(), without_anomaly_mode:
        return torch.autograd.grad(outputs, leaves, tangents, allow_unused=True, retain_graph=keep)


def _gradients_of(
    outputs: Sequence[object], leaves: Sequence[object], tangents: Sequence[torch.Tensor], *, keep: bool
) -> tuple[Sequence[Any], dict[int, Exception]]:
    """The gradients, and eager's errors for some outputs: then the gradients are the other outputs'.

    Raises eager's error where no output has a backward.
    """
    try:
        return _run_backward(outputs, leaves, tangents, keep=keep or len(outputs) > 1), {}
    except ForegradError:
        raise
    except RuntimeError:
        failing = _failing(outputs, leaves, tangents) if len(outputs) > 1 else {}
        if len(failing) in (0, len(outputs)):
            raise
    good = [i for i in range(len(outputs)) if i not in failing]
    return _run_backward([outputs[i] for i in good], leaves, [tangents[i] for i in good], keep=keep), failing


def _failing(outputs: Sequence[object], leaves: Sequence[object], tangents: Sequence[object]) -> dict[int, Exception]:
    failing: dict[int, Exception] = {}
    for position, (output, tangent) in enumerate(zip(outputs, tangents, strict=True)):
        try:
            _run_backward([output], leaves, [tangent], keep=True)
        except ForegradError:
            raise
        except RuntimeError as error:
            failing[position] = error
    return failing


class Backward:
    """The backward of a capture, run once: its gradients, and the errors that eager raises there.

    `error`: no output has a backward. `failing`: some outputs, by position, have none. `raising`: by graph output,
    raised on a path to no input that eager runs all the same; `aside`: likewise, by position.
    """

    def __init__(self, recorder: Recorder, lifting: Lifting, inputs: Inputs) -> None:
        self.recorder, self.lifting, self.inputs = recorder, lifting, inputs
        self.error: Exception | None = None
        self.failing: dict[int, Exception] = {}
        self.raising: dict[int, Exception] = {}
        self.aside: dict[int, Exception] = {}
        self.run = Run()  # its side effects
        self.arrived: list[InputRecord] = []  # the records of leaves, in the order in which their gradients are ready

    def gradients(
        self, outputs: Sequence[Any], sinks: Sequence[InputRecord], tangents: Sequence[torch.Tensor], *, keep: bool
    ) -> dict[InputRecord, Entry]:
        """The present gradients, by input; `keep`: keep the trace for a further derivative."""
        found: dict[InputRecord, Entry] = {}
        wrapped: list[Any] = []
        leaves = [record.leaf for record in sinks]
        unlinked = [record for record in sinks if is_no_grad_view(record)]
        has_asides = self._has_unlinked() or any(is_view(record.stand_in) for record in unlinked)
        try:
            others = other_leaves(outputs, leaves) if self.lifting.has_hooks else []  # hooks of these run, too
            own = {record: record.leaf for record in sinks if record.leaf is not None and record.leaf.is_leaf}
            with self._recording(tangents, keeps=True), noting_arrival(own) as arrived:
                results, self.failing = _gradients_of(
                    outputs, [*leaves, *others], tangents, keep=keep or has_asides or bool(unlinked or others)
                )
                for one in self.recorder.host.aspects:
                    one.ran()
                for record, gradient in zip(sinks, results, strict=False):
                    if not is_stand_in(gradient) and is_wrapper(gradient):
                        parts = [self.recorder.entry_of(part) for part in parts_of(gradient)]
                        wrapped.append((record.leaf, record.slot, opener().bare_spec(gradient), parts))
                    elif gradient is not None:  # a view, as a transposed weight's is, is taken only here
                        found[record] = self.recorder.entry_of(gradient)
                self.run = self.recorder.late.finish()
                self.run.wrapped = wrapped
            self.arrived = list(arrived)
            if others and self.run.has_effects:
                self._check_hooks(outputs, leaves, tangents)
        except ForegradError:
            raise
        except RuntimeError as error:
            self.error = self._named(error)
        self.failing = {position: self._named(error) for position, error in self.failing.items()}
        if self.failing and (self.run.has_effects or any(e.is_backward and e.once for e in self.recorder.tape.entries)):
            raise in_some_backwards(f"the backward beside that of {self._line_of(outputs[next(iter(self.failing))])}")
        if has_asides and self.error is None and not self.failing:
            self.aside = self._failing_aside(outputs, sinks, tangents)
        if self.error is not None or self.failing:
            self.inputs.see_as_views(unlinked)
        return found

    def _check_hooks(self, outputs: Sequence[Any], leaves: Sequence[object], tangents: Sequence[torch.Tensor]) -> None:
        """Raise where `backward()` does more than `torch.autograd.grad`, by hooks of leaves that the function made."""
        with self._recording(tangents):
            _run_backward(outputs, leaves, tangents, keep=True)
            run = self.recorder.late.finish()
        if any(len(getattr(run, name)) != len(getattr(self.run, name)) for name in ("updates", "checks", "written")):
            raise in_some_backwards(f"a hook on a leaf that the function makes, before {self._line_of(outputs[0])},")

    def _named(self, error: Exception) -> Exception:
        """The error; a refusal where eager may answer, because autograd has other sizes for a view than eager's has.

        A view that was given other memory is taken again by its operator where it is a fake, and by its place in memory
        where it is a tensor.
        """
        changes, values = self.recorder.changes, self.recorder.values
        swaps = [(event, event.after) for event in changes.log.events if event.after is not None]
        for event, after in swaps:
            view = values[event.tensor].fake
            if view is not None and is_view(view) and view.requires_grad and after.spec.shape != event.value.spec.shape:
                return UnsupportedError(
                    f"PyTorch fails in the derivative of a captured function: {first_line(error)} A cause may "
                    f"be the view that is given other sizes in place at {changes.where(view)} (`set_`, `.data = ...`); "
                    "use a tensor of its own."
                )
        return without_frames(error)

    def _has_unlinked(self) -> bool:
        """Whether views of tensors that require grad were made under no_grad, and something was written in place."""
        values = self.recorder.values.values()
        made = [v.fake for v in values if v.view is not None and not v.view.grad_enabled and v.fake is not None]
        if not any(is_view(fake) and fake.requires_grad for fake in made):
            return False
        return any(v.fake is not None and v._storage is not None and v._storage.changes for v in values)

    def _failing_aside(
        self, outputs: Sequence[Any], sinks: Sequence[InputRecord], tangents: Sequence[torch.Tensor]
    ) -> dict[int, Exception]:
        """By position, the errors of `backward()` where `torch.autograd.grad` answers: it also runs dead ends."""
        leaves = [record.leaf for record in sinks]
        found: dict[int, Exception] = {}
        for position, (output, tangent) in enumerate(zip(outputs, tangents, strict=True)):
            if not any(reach.outputs for reach in reached_from([output], leaves)):
                continue  # see `to_nowhere`
            try:
                self._run_whole(output, tangent)
            except ForegradError:
                raise
            except RuntimeError as error:
                found[position] = error
        return found

    def _run_whole(self, output: torch.Tensor, tangent: torch.Tensor, returned: Returned | None = None) -> bool:
        """The backward of an output, to all its leaves; `.grad` of inputs, and of leaves that the function made, stays.
        Returns whether the backward has effects. `returned`: what the call gives its caller, if that is known.
        """
        pairs = [(r.leaf, r.stand_in) for r in self.inputs.records]  # an argument may be made a leaf of its own
        leaves = [t for pair in pairs for t in pair if t is not None and is_usable(t) and t.is_leaf]
        made = other_leaves([output], leaves)
        leaves += made
        grads = [leaf.grad for leaf in leaves]
        try:
            for leaf in made:  # the engine adds in place to a gradient that is there
                if (
                    returned is not None
                    and leaf.grad is not None
                    and not returned.shows(self.recorder, leaf, leaf.grad)
                ):
                    leaf.grad = None
            with self._recording([tangent]):
                torch.autograd.backward([output], [tangent], retain_graph=True)
                return self.recorder.late.finish().has_effects or bool(self.recorder.late.missing)
        finally:
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = grad

    def _line_of(self, output: torch.Tensor) -> str:
        """The user's line that gave the output its value."""
        return user_line(self.recorder.value_of(output).read(self.recorder.emit).origin)

    def leading_nowhere(
        self,
        differentiable: list[int],
        gradients: list[Entry | None],
        reached: Mapping[InputRecord, GradientPaths],
        tangents: Any,
    ) -> dict[int, torch.Tensor]:
        """The outputs without a gradient that flows outside, with their tangents."""
        wrapped = ById((leaf, parts) for leaf, _, _, parts in self.run.wrapped)
        entries = [*gradients, *(entry for parts in wrapped.values() for entry in parts)]
        if self.error is not None or self.failing or (any(entries) and not reached):
            return {}
        fed: set[int] = set()
        for record, gradient in zip(self.inputs.records, gradients, strict=True):
            if gradient is not None or record.leaf in wrapped:
                fed |= reached[record].outputs
        found = {i: t for k, (i, t) in enumerate(zip(differentiable, tangents, strict=True)) if k not in fed}
        used = set(self.recorder.tape.live(entries)) if found and any(entries) else set()
        return {i: fake for i, (fake, entry) in found.items() if entry not in used}

    def reached(self, outputs: list[Any], least: int = 2) -> dict[InputRecord, GradientPaths]:
        """For each record, the outputs that lead to it, when there are `least` outputs or more."""
        if len(outputs) < least:
            return {}
        records = self.inputs.records
        # One that has a history by now was written to: gradients go on through that.
        found = reached_from(outputs, [r.leaf if takes_gradient(r) else None for r in records])
        return dict(zip(records, found, strict=True))

    def forget_unreached(self, reached: Mapping[InputRecord, GradientPaths]) -> None:
        """An error that no input's gradient leads to is for nobody to see."""
        if not any(paths.outputs for paths in reached.values()):
            self.error = None

    def to_nowhere(
        self, outputs: Mapping[int, Any], tangents: Sequence[torch.Tensor], returned: Returned | None = None
    ) -> None:
        """Run the backward of outputs, by their numbers, that lead to no input, to see whether it raises."""
        for (number, output), tangent in zip(outputs.items(), tangents, strict=True):
            effects = False
            try:
                effects = self._run_whole(output, tangent, returned)
            except ForegradError:
                pass
            except RuntimeError as error:
                self.raising[number] = error
            if effects:
                raise in_some_backwards(f"the backward of {self._line_of(output)}, which leads to no input,")

    def on_dead_ends(self, outputs: Mapping[int, Any], tangents: Sequence[torch.Tensor]) -> None:
        """Check the backward of outputs that lead to inputs and to a function that may be differentiated only once."""
        looked_at = raise_behind([*outputs.values()])
        numbers = [*outputs]
        picked = {numbers[k]: outputs[numbers[k]] for k in looked_at}
        self.to_nowhere(picked, [tangents[k] for k in looked_at])

    @contextlib.contextmanager
    def _recording(self, tangents: Sequence[torch.Tensor] = (), *, keeps: bool = False) -> Iterator[None]:
        """Context: the engine runs. Its effects are dropped, but for finished effects."""
        recorder = self.recorder
        marks, start = recorder.host.aspects.marks(), len(recorder.tape.entries)
        with recorder.backward_runs():
            recorder.late.begin(tangents)
            try:
                with self.lifting, recorder:
                    yield
            finally:
                recorder.late.finish()
                if not keeps:
                    recorder.host.aspects.drop(marks)
                    for entry in recorder.tape.entries[start:]:
                        entry.has_effect = entry.once = False


class InnerGradients(Aspect):
    """For each inner `autograd.grad`: the inputs differentiated by, and the inputs that the loss depends on.

    The inner gradient stays inside the function. Eager's goes on: from one argument, through outside computation, to a
    further argument.
    """

    def __init__(self, inputs: Inputs, recorder: Recorder, name: str) -> None:
        self.inputs, self.recorder, self.name = inputs, recorder, name
        self.found: list[tuple[list[InputRecord], list[InputRecord], str]] = []
        self.was_asked = False

    def grad(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.autograd.grad` on stand-ins."""
        if not self.recorder.in_backward:  # that of the function itself
            self._note(*args[:2], **kwargs)
        return function(*args, **kwargs)

    functions: ClassVar[Mapping[Any, Row]] = {torch.autograd.grad: grad}

    def _note(self, outputs: Any, inputs: object, **_: object) -> None:
        """Raise where eager would leave the function."""
        self.was_asked = True
        by_stand_in = self.inputs.by_stand_in
        outputs = [t for t in _flat(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        targets = [by_stand_in[t] for t in _flat(inputs) if t in by_stand_in]
        targets = [r for r in targets if r.real.requires_grad]
        if not outputs or not targets:
            return
        rest = [r for r in self.inputs.records if r.real.requires_grad and r not in targets and takes_gradient(r)]
        reached = reached_from(outputs, [r.leaf for r in rest])
        others = [r for r, reach in zip(rest, reached, strict=True) if reach.outputs]
        others += targets if len(targets) > 1 else []
        where = user_line(self.recorder.origins.here())
        slots, also = (", ".join(str(r.slot) for r in group) for group in (targets, others))
        said = (
            f"`{self.name}` takes a gradient by {slots} at {where}. The input has hooks, or a second input "
            f"({also or 'none as yet'}) was computed from it outside: in eager the gradient passes these too. "
            "Compute the second input inside the compiled function, or detach it."
        )
        reals = [r.real for r in targets]
        if have_hooks(reals) or lead_to([r.real for r in others], reals):
            raise UnsupportedError(said)
        self.found.append((targets, others, said))

    def effects(self, run: Settled) -> list[KeepApart]:
        return [
            KeepApart(tuple(run.number[r] for r in targets), tuple(run.number[r] for r in others), said)
            for targets, others, said in self.found
        ]


def _flat(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


# -------------------------------------------------------------------- dead ends
# Ways of a backward that lead to no input and raise: behind a Function marked `once_differentiable`.
#
# Eager runs them in `backward()`, which goes to every leaf, and not in `torch.autograd.grad` by an input. So the
# outputs that lead there get a history that raises, beside the history that gives gradients.


_DELAYED = "torch::autograd::Error"  # the node of `torch._C._functions.DelayedError`


def raise_behind(outputs: Sequence[torch.Tensor]) -> list[int]:
    """The positions of the outputs behind a node that always raises."""
    if not any(node.name() == _DELAYED for node in nodes_behind(outputs)):
        return []
    return [i for i, o in enumerate(outputs) if any(node.name() == _DELAYED for node in nodes_behind([o]))]


def errors_behind(
    outputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    known: Sequence[torch.Tensor | None],
    recording: Callable[[], AbstractContextManager[None]],
) -> dict[int, Exception]:
    """By an output's position, eager's errors on the way to leaves that are not known.

    A run without an error has recorded its effects within the context `recording`.
    """
    found: dict[int, Exception] = {}
    for position, (output, seed) in enumerate(zip(outputs, seeds, strict=True)):
        others = other_leaves([output], known)
        try:
            with recording():
                run_engine([output], others, [seed], create_graph=False)
        except ForegradError:
            raise
        except RuntimeError as error:
            found[position] = error
    return found


# -------------------------------------------------------------------- the backward of one capture
# The backward of one capture: the outputs with gradients, the inputs that the gradients go to, and the ways that lead
# nowhere.


@dataclasses.dataclass(frozen=True, slots=True)
class Differentiated:
    """`outputs`: the graph's outputs with a gradient, each with its tangent; `rootless`: outputs with gradients that
    lead nowhere. `gradients`: an entry, or None, for each input. `reached`: by input, see `Backward.reached`.
    """

    outputs: list[int]
    rootless: list[int]
    tangents: list[tuple[torch.Tensor, Entry]]
    gradients: list[Entry | None]
    reached: Mapping[InputRecord, GradientPaths]

    def parted(self, backward: Backward, returned: Returned) -> Differentiated:
        """Separate the outputs with gradients that lead nowhere."""
        nowhere = backward.leading_nowhere(self.outputs, self.gradients, self.reached, self.tangents)
        if not nowhere:
            return self
        backward.to_nowhere({i: returned.graph[i].carrier for i in nowhere}, list(nowhere.values()), returned)
        kept = [k for k, i in enumerate(self.outputs) if i not in nowhere]
        backward.run.keep_tangents(kept)
        reached = {key: reach.of_outputs(kept) for key, reach in self.reached.items()} if len(kept) > 1 else {}
        outputs, tangents = [self.outputs[k] for k in kept], [self.tangents[k] for k in kept]
        return Differentiated(outputs, list(nowhere), tangents, self.gradients, reached)


def differentiate(backward: Backward, graph: GraphResults, *, keep: bool) -> Differentiated:
    """Run the backward on fakes. `keep`: keep the trace for a further derivative."""
    records, carrying = backward.inputs.records, graph.carrying_gradients()
    outputs, with_history = [*carrying], [*carrying.values()]
    tangents = [make_tangent(backward.recorder, graph[i].spec) for i in outputs]
    reached = backward.reached(with_history)
    sinks = [record for record in records if takes_gradient(record)]
    gradients: dict[InputRecord, Any] = {}
    if outputs and sinks:
        gradients = backward.gradients(with_history, sinks, [f for f, _ in tangents], keep=keep)
        backward.raising |= {outputs[position]: error for position, error in backward.aside.items()}
    return Differentiated(outputs, [], tangents, [gradients.get(record) for record in records], reached)
