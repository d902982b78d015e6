"""What the backwards of a capture do besides giving gradients, as outputs of their graphs and fields of signatures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...graph.effect_log import Write
from ...graph.effects import BackwardEffects, LateUpdate, Result, WrappedGradient
from ...graph.slots import Checked, Grad, Part, Slot, Updated
from ...identity import ById, IdSet
from ..heap.alias import memory_root
from ..heap.records import InputRecord
from ..heap.refusals import written_by_backward
from ..recorder.backward_writes import Run
from ..recorder.recorder import Recorder
from ..tape.tape import Entry
from ..values.prefix import generators_drawn_from
from .resumable_trace import ValueRef

aten = torch.ops.aten


def written_by(recorder: Recorder, records: Sequence[InputRecord]) -> IdSet[torch.Tensor]:
    """The inputs that the backward turned out to write to, for another capture to know from the start."""
    found: IdSet[torch.Tensor] = IdSet()
    for root in recorder.late.missing:
        record = next((r for r in records if r.initial is root), None)
        if record is None or recorder.values[record.stand_in] is not root:
            slots = [str(r.slot) for r in records if r.initial.storage is root.storage]
            what = "shares memory with another input" if record is None else "is given other memory or sizes"
            raise written_by_backward(" and ".join(slots), f"the backward of `{recorder.host.name}`", f"which {what}")
        found.add(record.real)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a graph for what a run did, and what the signature says of them."""

    entries: list[Entry]
    slots: list[Slot]
    effects: BackwardEffects
    leaves: tuple[Any, ...]  # those whose gradients are wrapper subclasses

    def of(self, leaves: Sequence[torch.Tensor | None], live: tuple[int, ...]) -> BackwardEffects:
        """The effects of a graph with inputs that have these leaves, of which the backward writes to those `live`."""
        number = ById((leaf, i) for i, leaf in enumerate(leaves) if leaf is not None)
        given = zip(self.effects.wrapped, self.leaves, strict=True)
        wrapped = tuple(dataclasses.replace(one, input=number[leaf]) for one, leaf in given)
        return dataclasses.replace(self.effects, live=live, wrapped=wrapped)


def effects_of(recorder: Recorder, run: Run, slots: Sequence[Slot], tangents: Sequence[Slot]) -> Outputs:
    """For a backward at the end of a joint graph; `slots` are those of the live inputs. `Outputs.of` tells the rest."""
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
        updates.append(LateUpdate(add(_own_copy(recorder, entry), slot), live, tangent, counted))
    drawn = [entry for entry in recorder.tape.entries if entry.is_backward] if checks else []
    wrapped = []
    for _, of, spec, parts in run.wrapped:
        part_slots = [Part(Grad(of), path) for path in spec.paths()]
        wrapped.append(WrappedGradient(-1, spec, tuple(map(add, parts, part_slots))))
    made = tuple(updates), run.once, tuple(wrapped)
    effects = BackwardEffects(tuple(found), checks, generators_drawn_from(drawn), (), *made)
    return Outputs(entries, found, effects, tuple(leaf for leaf, *_ in run.wrapped))


class DerivedEffects:
    """What a derivative does: what the backward does that it is (`own`), and what its own backward does (`later`)."""

    def __init__(
        self, recorder: Recorder, own: Run, later: Run, tangents: Sequence[Slot], seeds: Sequence[Slot]
    ) -> None:
        slots = [live.slot for live in recorder.late.live]
        self.own = effects_of(recorder, own, slots, tangents)
        self.later = effects_of(recorder, later, slots, seeds)

    def fields(
        self, count: int, feeds: Sequence[ValueRef], leaves: Sequence[Any], given: Sequence[int], *, has_late: bool
    ) -> dict[str, Any]:
        """Fields of the signature. `count`: outputs before these; `given`: the tangents that came in. `feeds`,
        `leaves`: of its inputs.
        """
        number = {(place.kind, place.index): i for i, place in enumerate(feeds)}
        updates = []
        for update in self.own.effects.updates:
            key = ("tangent", given[update.tangent]) if update.live is None else ("live", update.live)
            updates.append(Write(number[key], update.output + count, differentiable=False, counted=update.counted))
        live = tuple(number["live", i] for i in range(sum(place.kind == "live" for place in feeds)))
        return {
            "checks": tuple(check.behind(count) for check in self.own.effects.checks),
            "log": tuple(updates),
            "in_backward": self.later.of(leaves, live if has_late else ()),
        }


def _own_copy(recorder: Recorder, entry: Entry) -> Entry:
    """The entry, or a copy of it where it is in memory that another write may change first."""
    root = memory_root(entry)
    if root.target is not None:
        return entry
    copy = recorder.emit(aten.clone.default, entry)
    copy.is_backward = True
    return copy


def check_outputs(recorder: Recorder, run: Run, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """No backward writes to what the function returns."""
    where = {root.storage: place for root, place in run.written}
    for leaf, path in zip(leaves, paths, strict=True) if where else ():
        value = recorder.values.get(leaf) if isinstance(leaf, torch.Tensor) else None
        if value is not None and value.storage in where:
            why = "which the caller has by then"
            raise written_by_backward(f"memory of the output {path}", where[value.storage], why)
