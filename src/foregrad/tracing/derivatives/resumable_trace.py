"""A captured function that can be differentiated again, and the session that continues its capture."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..._torch.engine import (
    disable_autocast,
    force_view_tracking,
    no_saved_tensors_hooks,
    single_threaded_backward,
    without_anomaly_mode,
)
from ..._torch.fakes import FakeTensor
from ..._torch.patches import patched
from ..._torch.stand_ins import is_stand_in, new_stand_in
from ..._torch.tensors import is_number
from ...errors import UnsupportedError
from ...graph.joint import JointGraph
from ...graph.meta import TensorSpec
from ...graph.slots import Slot
from ...identity import ById, IdSet
from ...locks import make_lock
from ..aspect import Aspects
from ..heap.alias import Value
from ..heap.recording import Host
from ..heap.refusals import in_some_backwards
from ..inputs.lifting import Lifting
from ..recorder.recorder import Recorder
from ..tape.tape import Entry, Numbering, Tape
from ..values.decisions import Known, KnownDecisions

aten = torch.ops.aten

# The derivative of these operators reads the first argument only if the derivative is itself to be differentiated: then
# it starts from the matrix, otherwise from the factors.
_READ_AGAIN = {
    aten._linalg_solve_ex.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRef:
    """Where a value is: `kind` is "input", "saved", "tangent", "output", "result" or "live", `index` the position among
    these.

    A result is an output of the function differentiated that it saves for itself: its value and its history. A live
    value is an input that the backward writes to, in its state at the backward's run.
    """

    kind: str
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class WrappedRef:
    """A wrapper subclass like `spec`, of the plain tensors at the places."""

    spec: Any
    parts: tuple[ValueRef, ...]


GradientRef = ValueRef | WrappedRef


@dataclasses.dataclass(frozen=True, slots=True)
class Derivative:
    """The backward of a function as a function of its own, with a backward.

    `feeds`: the place of each of its inputs: an input of the function differentiated (for its history, and for its
    saved value), a saved value or a tangent. `gradients`: for each input of the function differentiated, the output or
    the tangent that is its gradient, or None; `stops` likewise for the outputs that it stops at. `whole`: by first
    input, the wrapper subclasses with gradients besides their plain tensors'.
    """

    joint: JointGraph
    resumable: ResumableTrace
    feeds: tuple[ValueRef, ...]
    gradients: tuple[GradientRef | None, ...]
    stops: tuple[GradientRef | None, ...] = ()
    whole: Mapping[int, GradientRef] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ResumableTrace:
    """A captured function that can be differentiated again.

    `outputs`: the fakes of its differentiable outputs, their slots and the layouts of their tangents. `inputs`,
    `leaves`, `input_slots`: for each of its inputs the entry on the tape, the fake that its gradient is taken at (None:
    it gets none) and its slot. `random`: the random operators of its graph, by node name. `read_again`: the nodes with
    values that eager keeps for a second derivative alone. `known`: the values read on the way there. `valueless`:
    inputs that are there for their history only. `versions`: see `BackwardWrites`, once it has run. `made`: the wrapper
    subclasses that are made of outputs, by the outputs' positions. `wrappers`: edges of autograd's graph to wrapper
    subclasses among the inputs, by the positions of their plain tensors.
    """

    session: Session
    outputs: tuple[torch.Tensor, ...]
    output_slots: tuple[Slot, ...]
    tangent_specs: tuple[TensorSpec, ...]
    inputs: tuple[Entry, ...]
    leaves: tuple[torch.Tensor | None, ...]
    input_slots: tuple[Slot, ...]
    random: dict[str, Entry]
    read_again: frozenset[str]
    known: Known
    valueless: frozenset[int] = frozenset()
    versions: ById[torch.Tensor, int] = dataclasses.field(default_factory=ById)
    made: Mapping[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)
    wrappers: Mapping[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)


def read_again(tape: Tape) -> frozenset[str]:
    """A tape's nodes with values that only a second derivative reads."""
    return frozenset(
        entry.args[0].name
        for entry in tape.with_operator(_READ_AGAIN.__contains__)
        if isinstance(entry.args[0], Entry) and entry.args[0].name is not None
    )


# -------------------------------------------------------------------- session
# The state of a capture that is kept so that it can go on later: to differentiate the function once more.


class Session(Host):
    """The recorder of a finished capture, with its tape, and the modes to run under. Holds no real tensor.

    `known`: by the id of each real tensor that the function used, a function that gives the tensor while it lives, and
    its stand-in. `has_hooks`: the function put hooks on its own tensors; not being linear, they are to see each
    gradient whole.
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        aspects: Aspects,
        known: dict[int, tuple[Callable[[], object], torch.Tensor]],
        *,
        has_hooks: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.lock = make_lock()  # held to go on with the capture
        self.has_hooks = has_hooks
        self.recorder = recorder
        self.known = known
        self.numbering = Numbering(recorder.tape)
        self.aspects = aspects.resumed()
        self.lifting = Lifting(self, recorder)
        self.decisions = KnownDecisions(recorder.decisions, self.numbering)
        self.written: IdSet[torch.Tensor] = IdSet()
        recorder.resume(self, self.decisions, run_engine.__code__)  # without the first capture: it has arguments

    def where(self) -> str:
        return f"the backward of `{self.name}`"

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        if is_stand_in(real) or isinstance(real, FakeTensor) or is_number(real):
            return real
        reference, stand_in = self.known.get(id(real), (None, None))
        if reference is None or reference() is not real or stand_in is None:
            raise UnsupportedError(
                f"the backward of `{self.name}` uses a tensor {TensorSpec.of(real)} that its forward did not use, so "
                "it can't be differentiated again. Use that tensor in the forward and ctx.save_for_backward."
            )
        return stand_in

    def on_missing(self, root: Value, where: str) -> None:
        raise in_some_backwards(f"{where}, where the backward of `{self.name}` is differentiated or runs in part,")

    @contextlib.contextmanager
    def recording(self, tangents: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """Context: operators on fakes go on the tape, as part of a backward. `recorder.late.finish()` ends it."""
        recorder = self.recorder
        with recorder.backward_runs(), recorder.in_region(None):
            recorder.late.begin(tangents)
            recorder.phases.clear()  # each run of a node checks anew
            try:
                # Autocast belongs to the forward: eager's backward usually runs outside its region.
                with (
                    patched(self),
                    force_view_tracking(),
                    no_saved_tensors_hooks(),
                    single_threaded_backward(),
                    fresh_autocast_cache(),
                    disable_autocast(),
                    without_anomaly_mode,  # nothing can be nan here
                    self.lifting,
                    recorder,
                ):
                    yield
            except BaseException:
                recorder.late.finish()
                raise

    def tangent(self, spec: TensorSpec, *, requires_grad: bool = False) -> tuple[torch.Tensor, Entry]:
        """A new fake gradient for an output of the spec, and its entry."""
        fake, entry = make_tangent(self.recorder, spec)
        return fake.requires_grad_(requires_grad), entry


def run_engine(
    outputs: Sequence[Any], leaves: Sequence[Any], tangents: Sequence[Any], *, create_graph: bool
) -> Sequence[torch.Tensor | None]:
    """Differentiable gradients of fakes. The function's frame ends the user's part of a stack."""
    if not outputs or not leaves:
        return [None] * len(leaves)
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        outputs, leaves, tangents, allow_unused=True, retain_graph=True, create_graph=create_graph
    )
    return found


def make_tangent(recorder: Recorder, spec: TensorSpec) -> tuple[torch.Tensor, Entry]:
    """A fake that comes in from outside, laid out as `spec` is, or contiguously where that has gaps or overlaps."""
    spec = spec.fresh(spec.shape, spec.stride if spec.is_dense else None)
    fake = new_stand_in(spec.shape, spec.stride, spec.dtype, spec.device)
    entry = Entry(None, spec=spec)
    recorder.tape.append(entry)
    recorder.values[fake] = Value(fake, entry, spec)
    return fake, entry


@contextlib.contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Autocast remembers casts of parameters: keep the fakes' and the real ones' apart."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
