"""What is kept of a capture so that it can go on later: to differentiate the function once more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._torch.dispatch import (
    clear_autocast_cache,
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
from ...graph.meta import TensorSpec, contiguous_strides
from ...identity import IdSet
from ...locks import make_lock
from ..heap.alias import Value
from ..heap.recording import Host
from ..heap.refusals import in_some_backwards
from ..inputs.lifting import Lifting
from ..recorder.checkpoint_regions import NoRegions
from ..recorder.recorder import Recorder
from ..tape.tape import Entry, Numbering
from ..values.decisions import KnownDecisions


class Session(Host):
    """The recorder of a finished capture, with its tape, and the modes to run under. Holds no real tensor.

    `known`: for the id of each real tensor that the function used, what gives it while it is there, and its stand-in.
    `has_hooks`: the function put hooks on its own tensors; not being linear, they are to see each gradient whole.
    """

    def __init__(
        self, name: str, recorder: Recorder, known: dict[int, tuple[Any, torch.Tensor]], *, has_hooks: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.lock = make_lock()  # held to go on with the capture
        self.has_hooks = has_hooks
        self.recorder = recorder
        self.known = known
        self.numbering = Numbering(recorder.tape)
        self.lifting = Lifting(self, recorder)
        self.swap, self.engine = self.lifting.swap, self.lifting.in_engine  # type: ignore[method-assign]
        self.checkpoints = NoRegions()
        self.decisions = KnownDecisions(recorder.decisions, self.numbering)
        self.written: IdSet[torch.Tensor] = IdSet()
        recorder.resume(self, self.decisions, run_engine.__code__)  # nothing of the first capture, which has arguments

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
        """Context: what runs on fakes goes on the tape, as part of a backward. `recorder.late.finish()` ends it."""
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
        """A new fake gradient for an output of this spec, and its entry."""
        fake, entry = make_tangent(self.recorder, spec)
        return fake.requires_grad_(requires_grad), entry


def run_engine(
    outputs: Sequence[Any], leaves: Sequence[Any], tangents: Sequence[Any], *, create_graph: bool
) -> Sequence[torch.Tensor | None]:
    """Gradients of fakes, which can be asked for again. The frame of this function ends the user's part of a stack."""
    if not outputs or not leaves:
        return [None] * len(leaves)
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        outputs, leaves, tangents, allow_unused=True, retain_graph=True, create_graph=create_graph
    )
    return found


def make_tangent(recorder: Recorder, spec: TensorSpec) -> tuple[torch.Tensor, Entry]:
    """A fake that comes in from outside, laid out as `spec` is, or contiguously where that has gaps or overlaps."""
    stride = spec.stride if spec.is_dense else contiguous_strides(spec.shape)
    spec = TensorSpec(spec.shape, stride, spec.dtype, spec.device)
    fake = new_stand_in(spec.shape, spec.stride, spec.dtype, spec.device)
    entry = Entry(None, spec=spec)
    recorder.tape.append(entry)
    recorder.values[fake] = Value(fake, entry, spec)
    return fake, entry


@contextlib.contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Autocast remembers casts of parameters: keep the fakes' and the real ones' apart."""
    clear_autocast_cache()
    try:
        yield
    finally:
        clear_autocast_cache()
