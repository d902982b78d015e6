"""Checkpointed regions: entries recorded inside are tagged with the user's policy, for the partitioners.

An inner checkpoint is part of the outer: its own policy is asked when the outer checkpoint is computed again, and has
no say in the forward's residuals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from .._torch.ops import has_effects, waits_for_others
from ..errors import UnsupportedMutationError, UnsupportedOpError, UnsupportedSideEffectError
from ..graph.calls import call_of
from ..locks import Bind
from ..tracing.aspect import Aspect, Finished, aspect
from ..tracing.heap.alias import memory_root
from ..tracing.heap.recording import Host, Recording
from ..tracing.kernels.checks import Check
from ..tracing.tape.opinfo import op_info
from ..tracing.tape.origin import user_line
from ..tracing.tape.tape import Entry, entries_in
from ._torch.checkpoints import install


@dataclasses.dataclass(frozen=True, slots=True)
class _Tag:
    """The tag of a checkpointed region, or of an inner operator with a policy of its own."""

    region: int
    policy: CheckpointPolicy


@aspect
class CheckpointRegions(Aspect):
    """The checkpointed regions of one capture."""

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        install(bind, current)

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder
        self.numbers = itertools.count(1)
        self.depth = 0
        self.must: list[Entry] = []  # values that a policy says to compute again at any price

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Context: entries are recorded in a checkpointed region."""
        tag = self.recorder.recompute or _Tag(next(self.numbers), CheckpointPolicy.PREFER_RECOMPUTE)
        written, recorder = self.recorder.host.changed_since(), self.recorder
        entries, checks = len(recorder.tape.entries), len(recorder.checks.made)
        self.depth += 1
        try:
            with self.recorder.in_region(tag):
                yield
        finally:
            self.depth -= 1
        if not torch.is_grad_enabled():
            return
        called = [*map(_acts, recorder.tape.entries[entries:]), *map(_acts, recorder.checks.made[checks:])]
        calls = next((f"calls `{name}`" for name in called if name), None)
        what = written() or calls
        if what is not None:
            raise UnsupportedSideEffectError(
                f"a checkpointed part {what}, and eager repeats this when the backward recomputes the part; a "
                "compiled call would not. Move this outside the checkpoint."
            )

    def chosen(self, depth: int, run: Callable[[], tuple[Any, Any]]) -> Any:
        """An operator's result. `run()` also gives the user's policy for the operator, set at `depth`."""
        entries, tag = self.recorder.tape.entries, self.recorder.recompute
        start = len(entries)
        result, policy = run()
        if depth == 1 and tag is not None and policy is not None:
            if isinstance(policy, bool):
                policy = CheckpointPolicy.MUST_SAVE if policy else CheckpointPolicy.PREFER_RECOMPUTE
            for entry in entries[start:]:
                entry.recompute = _Tag(tag.region, policy)
                if policy is CheckpointPolicy.MUST_RECOMPUTE:
                    self._must_run_again(entry)
        return result

    def named(self, tensor: torch.Tensor, name: str) -> None:
        """The user names the present value of `tensor`. A view is kept by its memory, so the memory has the name."""
        recorder = self.recorder
        value = recorder.values.get(tensor)
        if value is not None:  # else a tensor that the function brought along: there before the call
            entry = value.root.read(recorder.emit)
            meta = recorder.tape.meta.setdefault(entry, {})
            meta["checkpoint_names"] = tuple(dict.fromkeys((*meta.get("checkpoint_names", ()), name)))

    def _must_run_again(self, entry: Entry) -> None:
        self.must.append(entry)
        if entry.has_effect:
            raise UnsupportedOpError(
                f"a checkpoint's policy says MUST_RECOMPUTE for `{entry.target}` at {user_line(entry.origin)}; it "
                "draws random numbers: a compiled call draws each once, and saves it. Let the policy say "
                "PREFER_RECOMPUTE or MUST_SAVE there."
            )

    def resumed(self) -> Aspect:
        return NoRegions(self.recorder.host, self.recorder)

    def finished(self, run: Finished) -> None:
        """Raise where an operator that must be computed again reads an input that the call overwrites."""
        written = [run.records[update.input] for update in run.joint.signature.updates]
        updates = {record.entry: str(record.slot) for record in written}
        for entry in self.must if updates else ():
            name = next((updates[r] for r in map(memory_root, entries_in(entry.args)) if r in updates), None)
            is_view = hasattr(entry.target, "_schema") and op_info(entry.target).is_view
            if name is not None and not is_view:
                raise UnsupportedMutationError(
                    f"a checkpoint's policy says MUST_RECOMPUTE for `{entry.target}` at {user_line(entry.origin)}; "
                    f"it reads {name}, and the function overwrites {name} before the backward. Write to a copy, or "
                    "let the policy say PREFER_RECOMPUTE."
                )


def _acts(made: Entry | Check) -> str:
    """The name of a call beyond computing: an eager region, or a custom operator with effects or without results."""
    if isinstance(made, Check):
        return str(made.op) if getattr(made.op, "namespace", "aten") != "aten" or made.op is _PRINT else ""
    call = call_of(made.target, made.args)
    if call is not None:
        return call.acts
    return str(made.target) if has_effects(made.target) and not waits_for_others(made.target) else ""


_PRINT = torch.ops.aten._print.default


class NoRegions(Aspect):
    """Where everything is part of a backward, nothing is tagged."""

    depth = 0

    def region(self) -> Any:
        return contextlib.nullcontext()

    def chosen(self, _depth: int, run: Callable[[], tuple[Any, Any]]) -> Any:
        return run()[0]

    def named(self, tensor: torch.Tensor, name: str) -> None:
        pass
