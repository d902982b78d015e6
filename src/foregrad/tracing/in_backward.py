"""What a backward does besides giving gradients: its checks, and its writes to tensors that outlive it.

A backward reads what it writes to as that is when the backward runs, which may be after other backwards: for such
inputs the joint graph takes their value then as one more tangent (`Live`), and gives the value that they have after it.
The fakes are put back to what they were after the forward, version counters included: the engine may run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._torch.tensors import is_view, set_version, version_unseen
from ..errors import UnsupportedMutationError
from ..graph.effects import BackwardEffects, LateUpdate, Result
from ..graph.signature import Update
from ..graph.slots import Checked, Slot, Updated
from .alias import Value
from .checks import Check
from .decisions import generators_drawn_from
from .opinfo import OpInfo
from .records import InputRecord
from .roots import memory_root
from .tape import Entry

if TYPE_CHECKING:
    from .derived import Place
    from .recorder import Recorder

__all__ = ["BackwardWrites", "DerivedEffects", "LiveInput", "Run", "check_outputs", "effects_of", "written_by"]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LiveInput:
    """An input that some backward writes to: its value when the forward begins, its stand-in and its slot."""

    initial: Value
    stand_in: torch.Tensor
    slot: Slot


@dataclasses.dataclass(slots=True)
class Run:
    """What one run of a backward did. `live`: for each live input what it held; `updates`: (its position, or None and
    that of a tangent; the new value; whether the write moves a version counter).
    """

    live: list[Entry] = dataclasses.field(default_factory=list)
    updates: list[tuple[int | None, int, Entry, bool]] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)
    written: list[tuple[Value, str]] = dataclasses.field(default_factory=list)  # what the forward had made; where
    once: str = ""

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

    `live`: inputs known to be written by backwards, `ids` those of their tensors. `missing`: others that one has
    written to, by the id of their root; `on_missing(root, where)` may raise instead.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.name = "function"
        self.ids: set[int] = set()
        self.live: list[LiveInput] = []
        self.tangents: Sequence[torch.Tensor] = ()
        self.missing: dict[int, Value] = {}
        self.on_missing: Callable[[Value, str], None] | None = None
        self.written: dict[int, tuple[Value, Entry, str]] = {}  # made by the forward, by root: what they were; where
        self.touched: dict[int, tuple[torch.Tensor, int]] = {}  # by id, what was ever written; its version before
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._run = Run()
        self._known: set[int] | None = None  # ids of the entries from before this run, where there was a backward
        self._start = 0
        self._first_check = 0

    def met(self, record: InputRecord) -> None:
        """One more input; the backward itself may be the first to look at it."""
        if id(record.real) in self.ids:
            live = LiveInput(record.initial, record.stand_in, record.slot)
            self.live.append(live)
            if self.recorder.in_backward:
                self.start(live)

    # ---------------------------------------------------------------- one run

    def begin(self, tangents: Sequence[torch.Tensor] = ()) -> None:
        """A backward begins: live inputs hold what they hold by then."""
        self._run, self.tangents = Run(), tangents
        self.written, self._versions, self._known = {}, [], None
        self._start = len(self.recorder.tape.entries)
        self._first_check = len(self.recorder.checks.made)
        for live in self.live:
            self.start(live)

    def start(self, live: LiveInput) -> None:
        """From here on in this backward, an input holds what it holds when the backward runs."""
        entry = Entry(None, spec=live.initial.spec)
        entry.is_backward = True
        self.recorder.tape.append(entry)
        self._run.live.append(entry)
        self.written[id(live.initial)] = live.initial, _entry_of(live.initial), ""
        self._versions.append((live.stand_in, version_unseen(live.stand_in)))
        _hold(live.initial, entry)

    def finish(self, *, restore: bool = True) -> Run:
        """The backward is over and its results are read: what it did since it began, which is put back.

        `restore`: version counters too; the backward of this backward is to find them as this leaves them.
        """
        rec, run = self.recorder, self._run
        run.checks = rec.checks.made[self._first_check :]
        del rec.checks.made[self._first_check :]
        for position, live in enumerate(self.live):
            if position < len(run.live) and _entry_of(live.initial) is not run.live[position]:
                before = next(version for fake, version in self._versions if fake is live.stand_in)
                run.updates.append((position, 0, _entry_of(live.initial), version_unseen(live.stand_in) != before))
        for position, tangent in enumerate(self.tangents):
            value = rec.values[id(tangent)]
            if id(value) in self.written:
                run.updates.append((None, position, _entry_of(value), True))
        known = {id(live.initial) for live in self.live} | {id(rec.values[id(tangent)]) for tangent in self.tangents}
        for key, (root, entry, where) in self.written.items():
            if key not in known and not root.storage.is_input:
                run.written.append((root, where))
                run.once = (
                    f"a second backward through one call of `{self.name}`: the first has written, at {where}, to a "
                    "tensor of the forward's. Write to a copy of it."
                )
            _hold(root, entry)
        for tensor, version in reversed(self._versions):
            self.touched.setdefault(id(tensor), (tensor, version))
            if restore:
                set_version(tensor, version)
        self.written, self._versions, self.tangents, self._run = {}, [], (), Run()
        return run

    def versions(self) -> dict[int, int]:
        """The version counters, as they are, of what backwards have written to."""
        return {key: version_unseen(tensor) for key, (tensor, _) in self.touched.items()}

    def restore(self, versions: Mapping[int, int]) -> None:
        """Put them back to those; to what the forward left where nothing was known of them by then."""
        for key, (tensor, version) in self.touched.items():
            set_version(tensor, versions.get(key, version))

    # ---------------------------------------------------------------- a write

    def note(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        """An operator of the backward that writes, or may do so in hiding, is about to run."""
        if info.hidden_writes and not self.recorder.writes.happen_in_hiding(info, args):
            return
        given = {**dict(zip(info.argument_names, args, strict=False)), **kwargs}
        targets = [given.get(info.argument_names[i]) for i in (*info.writes, *info.hidden_writes)]
        self.note_targets(_tensors_in(targets), (args, kwargs), is_metadata=info.is_metadata_write)

    def note_targets(self, targets: Sequence[torch.Tensor], arguments: Any, *, is_metadata: bool = False) -> None:
        """A write to these tensors, by an operator with these arguments."""
        rec = self.recorder
        for tensor in targets:
            value = rec.value_of(tensor)
            root = value.root
            if self._is_new(root):
                continue
            where = rec.where()
            if is_metadata:
                raise UnsupportedMutationError(
                    f"{where} changes the sizes, or the memory, of a tensor of the forward's; write to its elements."
                )
            keeps_history = not root.storage.is_input or is_view(tensor) or rec.values[id(tensor)] is root
            differentiable = any(t.requires_grad for t in [tensor, *_tensors_in(arguments)])
            differentiable |= not root.storage.is_input  # what is saved of it would be what it is by then
            if keeps_history and differentiable and torch.is_grad_enabled():
                raise UnsupportedMutationError(
                    f"{where} writes, with gradients on, to a tensor that outlives it, whose history can't be given "
                    "back. Write under torch.no_grad(), or what is detached; to a copy, where it is the forward's own."
                )
            self._versions.append((tensor, version_unseen(tensor)))
            if root.storage.is_input and id(root) not in self.written:
                if self.on_missing is not None:
                    self.on_missing(root, where)
                self.missing[id(root)] = root
            self.written.setdefault(id(root), (root, _entry_of(root), where))

    def _is_new(self, root: Value) -> bool:
        """Whether this backward has made the memory itself."""
        original = root.original
        if original is None or not original.is_backward:
            return False
        if self._known is None:
            self._known = {id(entry) for entry in self.recorder.tape.entries[: self._start] if entry.is_backward}
        return id(original) not in self._known


def _entry_of(root: Value) -> Entry:
    assert root.entry is not None, "the root of a storage is always current"
    return root.entry


def _hold(root: Value, entry: Entry) -> None:
    """From here on `root` holds what `entry` is; nobody has written to it."""
    storage = root.storage
    storage.generation += 1
    root.entry, root.generation = entry, storage.generation
    storage.last_scatter = None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return _tensors_in(list(value.values())) if isinstance(value, dict) else []


def written_by(recorder: Recorder, records: Sequence[InputRecord]) -> set[int]:
    """The ids of the inputs that the backward turned out to write to, for another capture to know from the start."""
    found = set()
    for root in recorder.late.missing.values():
        record = next((r for r in records if r.initial is root), None)
        if record is None or recorder.values[id(record.stand_in)] is not root:
            slots = [str(r.slot) for r in records if r.initial.storage is root.storage]
            what = "shares memory with another input" if record is None else "is given other memory or sizes"
            raise UnsupportedMutationError(
                f"the backward of `{recorder.late.name}` writes to {' and '.join(slots)}, which {what}. Write to a "
                "tensor of its own."
            )
        found.add(id(record.real))
    return found


# ------------------------------------------------------------------------------------------------ for the signature


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a graph for what a run did, and what the signature says of them."""

    entries: list[Entry]
    slots: list[Slot]
    effects: BackwardEffects


def effects_of(recorder: Recorder, run: Run, slots: Sequence[Slot], tangents: Sequence[Slot]) -> Outputs:
    """For a backward at the end of a joint graph; `slots` are those of the live inputs.

    `BackwardEffects.live` is left to the caller.
    """
    entries: list[Entry] = []
    found: list[Slot] = []

    def add(entry: Entry, slot: Slot) -> int:
        for number, known in enumerate(entries):
            if known is entry:
                return number
        entries.append(entry)
        found.append(slot)
        return len(entries) - 1

    checks = tuple(check.info(lambda e, c=check: Result(add(e, Checked(c.where)))) for check in run.checks)  # type: ignore[misc]
    updates = []
    for live, tangent, entry, counted in run.updates:
        slot = Updated(tangents[tangent] if live is None else slots[live])
        updates.append(LateUpdate(add(own_copy(recorder, entry), slot), live, tangent, counted))
    drawn = [entry for entry in recorder.tape.entries if entry.is_backward] if checks else []
    effects = BackwardEffects(tuple(found), checks, generators_drawn_from(drawn), (), tuple(updates), run.once)
    return Outputs(entries, found, effects)


class DerivedEffects:
    """What a derivative does: what the backward does that it is (`own`), and what its own backward does (`later`)."""

    def __init__(
        self, recorder: Recorder, own: Run, later: Run, tangents: Sequence[Slot], seeds: Sequence[Slot]
    ) -> None:
        slots = [live.slot for live in recorder.late.live]
        self.own = effects_of(recorder, own, slots, tangents)
        self.later = effects_of(recorder, later, slots, seeds)

    def fields(self, count: int, feeds: Sequence[Place], given: Sequence[int], *, has_late: bool) -> dict[str, Any]:
        """Fields of the signature. `count`: outputs before these; `given`: the tangents that came in."""
        number = {(place.kind, place.index): i for i, place in enumerate(feeds)}
        updates = []
        for update in self.own.effects.updates:
            key = ("tangent", given[update.tangent]) if update.live is None else ("live", update.live)
            updates.append(Update(number[key], update.output + count, differentiable=False, counted=update.counted))
        live = tuple(number["live", i] for i in range(sum(place.kind == "live" for place in feeds)))
        return {
            "checks": tuple(check.behind(count) for check in self.own.effects.checks),
            "updates": tuple(updates),
            "in_backward": dataclasses.replace(self.later.effects, live=live if has_late else ()),
        }


def own_copy(recorder: Recorder, entry: Entry) -> Entry:
    """The entry, or a copy of it where it is in memory that another write may change first."""
    root = memory_root(entry)
    if root.target is not None:
        return entry
    copy = recorder.emit(aten.clone.default, entry)
    copy.is_backward = True
    return copy


def check_outputs(recorder: Recorder, run: Run, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """No backward writes to what the function returns."""
    where = {id(root.storage): place for root, place in run.written}
    for leaf, path in zip(leaves, paths, strict=True) if where else ():
        value = recorder.values.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        if value is not None and id(value.storage) in where:
            raise UnsupportedMutationError(
                f"{where[id(value.storage)]} writes to memory of the output {path}, which the caller has by then. "
                "Return a copy, or write to one."
            )
