"""A backward's effects besides gradients: its checks, and its writes to tensors that outlive it.

A backward reads the current value of a tensor that it writes; an earlier backward may have changed it. For such an
input the joint graph takes the current value as one more tangent (`Live`), and gives the value after the backward. The
fakes are put back to their values after the forward, version counters included: the engine may run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..._torch.nested import tensors_in
from ..._torch.tensors import is_view, set_version, version_unseen
from ...graph.slots import Slot
from ...identity import ById
from ..heap.alias import Value
from ..heap.recording import Recording
from ..heap.records import InputRecord
from ..heap.refusals import written_by_backward
from ..kernels.checks import Check
from ..tape.opinfo import OpInfo
from ..tape.tape import Entry


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LiveInput:
    """An input that some backward writes to: its value when the forward begins, its stand-in and its slot."""

    initial: Value
    stand_in: torch.Tensor
    slot: Slot


@dataclasses.dataclass(slots=True)
class Run:
    """The effects of one run of a backward. `live`: for each live input its former value; `updates`: (its position, or
    None and a tangent's position; the new value; whether the write moves a version counter). `wrapped`: leaves with a
    wrapper subclass as their gradient, their slots, its spec, and its plain tensors.
    """

    live: list[Entry] = dataclasses.field(default_factory=list)
    updates: list[tuple[int | None, int, Entry, bool]] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)
    written: list[tuple[Value, str]] = dataclasses.field(default_factory=list)  # made by the forward; the place
    once: str = ""
    wrapped: list[tuple[Any, Slot, Any, list[Entry]]] = dataclasses.field(default_factory=list)

    def keep_tangents(self, kept: list[int]) -> None:
        """Only the tangents at these positions are left."""
        number = {old: new for new, old in enumerate(kept)}
        self.updates = [
            (live, number.get(tangent, 0), entry, counted)
            for live, tangent, entry, counted in self.updates
            if live is not None or tangent in number
        ]

    @property
    def has_effects(self) -> bool:
        return bool(self.updates or self.checks or self.once)


class BackwardWrites:
    """The writes of the backward that is recorded, if one is.

    `live`: inputs known to be written by backwards. `missing`: the roots of further inputs that a backward has written.
    """

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.live: list[LiveInput] = []
        self.tangents: Sequence[torch.Tensor] = ()
        self.missing: dict[Value, None] = {}
        self.written: dict[Value, tuple[Entry, str]] = {}  # made by the forward, by root: the entry before; the place
        self.touched: ById[torch.Tensor, int] = ById()  # everything ever written: its version before
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._run = Run()
        self._known: set[Entry] | None = None  # the entries from before this run, where there was a backward
        self._start = 0
        self._first_check = 0

    def met(self, record: InputRecord) -> None:
        """One more input; the backward itself may be the first to look at it."""
        if record.real in self.recorder.host.written:
            live = LiveInput(record.initial, record.stand_in, record.slot)
            self.live.append(live)
            if self.recorder.in_backward:
                self.start(live)

    # ---------------------------------------------------------------- one run

    def begin(self, tangents: Sequence[torch.Tensor] = ()) -> None:
        """A backward begins: live inputs have their current values."""
        self._run, self.tangents = Run(), tangents
        self.written, self._versions, self._known = {}, [], None
        self._start = len(self.recorder.tape.entries)
        self._first_check = len(self.recorder.checks.made)
        for live in self.live:
            self.start(live)

    def start(self, live: LiveInput) -> None:
        """From here on in the backward, an input has its value at the backward's run."""
        entry = Entry(None, spec=live.initial.spec)
        entry.is_backward = True
        self.recorder.tape.append(entry)
        self._run.live.append(entry)
        self.written[live.initial] = _entry_of(live.initial), ""
        self._versions.append((live.stand_in, version_unseen(live.stand_in)))
        _hold(live.initial, entry)

    def finish(self, *, restore: bool = True) -> Run:
        """The backward is over and its results are read: returns its effects, and puts them back.

        `restore`: version counters too; the backward's own backward is to find them as the backward leaves them.
        """
        rec, run = self.recorder, self._run
        run.checks = rec.checks.made[self._first_check :]
        del rec.checks.made[self._first_check :]
        for position, live in enumerate(self.live):
            if position < len(run.live) and _entry_of(live.initial) is not run.live[position]:
                before = next(version for fake, version in self._versions if fake is live.stand_in)
                run.updates.append((position, 0, _entry_of(live.initial), version_unseen(live.stand_in) != before))
        for position, tangent in enumerate(self.tangents):
            value = rec.values[tangent]
            if value in self.written:
                run.updates.append((None, position, _entry_of(value), True))
        known = {live.initial for live in self.live} | {rec.values[tangent] for tangent in self.tangents}
        for root, (entry, where) in self.written.items():
            if root not in known and not root.storage.is_input:
                run.written.append((root, where))
                run.once = (
                    f"a second backward through a call of `{self.recorder.host.name}`: the first backward wrote to a "
                    f"tensor of the forward, at {where}. Write to a copy."
                )
            _hold(root, entry)
        for tensor, version in reversed(self._versions):
            self.touched.setdefault(tensor, version)
            if restore:
                set_version(tensor, version)
        self.written, self._versions, self.tangents, self._run = {}, [], (), Run()
        return run

    def versions(self) -> ById[torch.Tensor, int]:
        """The present version counters of tensors that backwards have written."""
        return ById((tensor, version_unseen(tensor)) for tensor in self.touched)

    def restore(self, versions: ById[torch.Tensor, int]) -> None:
        """Put the counters back to `versions`; to the forward's last version where `versions` has none."""
        for tensor, version in self.touched.items():
            set_version(tensor, versions.get(tensor, version))

    # ---------------------------------------------------------------- a write

    def note(self, info: OpInfo, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """An operator of the backward that writes, or may do so in hiding, is about to run."""
        if info.hidden_writes and not self.recorder.writes.happen_in_hiding(info, args):
            return
        given = {**dict(zip(info.argument_names, args, strict=False)), **kwargs}
        targets = [given.get(info.argument_names[i]) for i in (*info.writes, *info.hidden_writes)]
        self.note_targets(tensors_in(targets), (args, kwargs), is_metadata=info.is_metadata_write)

    def note_targets(self, targets: Sequence[torch.Tensor], arguments: object, *, is_metadata: bool = False) -> None:
        """A write to the `targets`, by an operator with the `arguments`."""
        rec = self.recorder
        for tensor in targets:
            value = rec.value_of(tensor)
            root = value.root
            if self._is_new(root):
                continue
            where = rec.where()
            if is_metadata:
                raise written_by_backward("a tensor of the forward's", where, "and changes its sizes or memory")
            keeps_history = not root.storage.is_input or is_view(tensor) or rec.values[tensor] is root
            differentiable = any(t.requires_grad for t in [tensor, *tensors_in(arguments)])
            differentiable |= not root.storage.is_input  # a tensor saved of it would be the later value
            if keeps_history and differentiable and torch.is_grad_enabled():
                why = "with gradients on, and the tensor outlives the backward: its history can't be returned"
                raise written_by_backward("a tensor", where, why)
            self._versions.append((tensor, version_unseen(tensor)))
            if root.storage.is_input and root not in self.written:
                self.recorder.host.on_missing(root, where)
                self.missing[root] = None
            self.written.setdefault(root, (_entry_of(root), where))

    def _is_new(self, root: Value) -> bool:
        """Whether this backward has made the memory itself."""
        original = root.original
        if original is None or not original.is_backward:
            return False
        if self._known is None:
            self._known = {entry for entry in self.recorder.tape.entries[: self._start] if entry.is_backward}
        return original not in self._known


def _entry_of(root: Value) -> Entry:
    assert root.entry is not None, "the root of a storage is always current"
    return root.entry


def _hold(root: Value, entry: Entry) -> None:
    """From here on `root` has the value of `entry`, unwritten."""
    storage = root.storage
    storage.generation += 1
    root.entry, root.generation = entry, storage.generation
    storage.last_scatter = None
