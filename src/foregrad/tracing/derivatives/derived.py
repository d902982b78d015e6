"""The part of a capture's tape that makes a derivative: between what is at hand and what is wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ..._torch.graphs import symbol_of, symbols_in
from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedError
from ...graph.slots import Live, Saved, Slot, Tangent
from ..heap.views import undone
from ..tape.symbols import symbols_of_inputs
from ..tape.tape import Entry, Tape, entries_in, map_entries
from .resumable_trace import ResumableTrace, ValueRef

__all__ = ["AtHand", "Cut"]


@dataclasses.dataclass(frozen=True, slots=True)
class AtHand:
    """What a derivative of `origin` may start from; `start` is where it begins on the tape.

    By position: `results`, outputs that the function saves for itself; `sinks`, inputs that gradients reach, of which
    those in `valued` have kept their value; `tangents`, with the fake and the entry of each. `live` and `late`: the
    entries of the live inputs in the backward, and in the backward of that. `saved`: value numbers; `sizes`: symbolic
    numbers.
    """

    origin: ResumableTrace
    start: int
    results: list[int]
    sinks: list[int]
    valued: set[int]
    tangents: list[tuple[int, tuple[torch.Tensor, Entry]]]
    live: list[Entry]
    late: list[Entry]
    saved: list[tuple[ValueRef, int]]
    sizes: list[tuple[ValueRef, Any]]


class Cut:
    """The part of the tape between what is at hand and what is wanted, copied, with its inputs."""

    def __init__(self, given: AtHand, seeds: list[Entry]) -> None:
        origin = given.origin
        self.given, self.session = given, origin.session
        self.recorder, self.numbering = self.session.recorder, self.session.numbering
        self.in_backward = False  # what is copied from now on is part of the backward
        self.copies: dict[int, Entry] = {}  # by number
        self.used: set[int] = set()
        self.sizes: dict[int, Any] = {}  # the numbers that saved sizes are, by the id of their entry
        self.sources: list[tuple[ValueRef, Slot, Entry, torch.Tensor | None, Entry]] = []
        self.seeds = [self._input(entry) for entry in seeds]
        for i in given.results:
            value = self.recorder.value_of(origin.outputs[i])
            entry = value.read(self.recorder.emit)
            self.sources.append((ValueRef("result", i), origin.output_slots[i], entry, value.fake, self._input(entry)))
        for i in given.sinks:
            entry = origin.inputs[i]
            own = self._input(entry) if i in given.valued else Entry(None, spec=entry.spec)
            self.sources.append((ValueRef("input", i), origin.input_slots[i], entry, origin.leaves[i], own))
        for i, (fake, entry) in given.tangents:
            leaf = fake if fake.requires_grad else None
            self.sources.append(
                (ValueRef("tangent", i), Tangent(origin.output_slots[i]), entry, leaf, self._input(entry))
            )
        for i, (live, entry) in enumerate(zip(self.recorder.late.live, given.live, strict=True)):
            self.sources.append((ValueRef("live", i), Live(live.slot), entry, None, self._input(entry)))
        self.late = [self._input(entry) for entry in given.late]  # the same in the backward of this
        self.saved: dict[int, tuple[ValueRef, Slot, Entry, None, Entry]] = {}
        for place, number in given.saved:
            first = self.numbering.first[number]
            if number not in self.copies:
                slot = Saved(first.name or f"value {place.index}")
                self.saved[number] = (place, slot, first, None, self._input(first))
        self.undone: dict[int, tuple[Entry, int]] = {}
        for number in list(self.saved):
            self._undo_views(number)

    def _undo_views(self, number: int) -> None:
        """What a saved view that rearranges a whole tensor was taken of: for one, a transposed parameter."""
        saved = number
        while True:
            view = self.numbering.first[number]
            base = undone(view, self.copies[number])
            if base is None or (number := self.numbering.of(view.args[0])) in self.copies:
                return
            self.copies[number] = base
            self.undone[number] = base, saved

    def _input(self, entry: Entry) -> Entry:
        copy = Entry(None, spec=entry.spec)
        self.copies[self.numbering.of(entry)] = copy
        return copy

    def copy(self, wanted: Entry) -> Entry:
        """The copy of an entry and of all it needs."""
        numbering, copies, used = self.numbering, self.copies, self.used
        stack = [numbering.of(wanted)]
        while stack:
            number = stack[-1]
            used.add(number)
            if number in copies:
                stack.pop()
                continue
            entry = numbering.first[number]
            needed = [numbering.of(e) for e in (*entries_in(entry.args), *entries_in(entry.kwargs))]
            used.update(needed)
            missing = [n for n in needed if n not in copies]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            copies[number] = self._copied(entry)
        return copies[numbering.of(wanted)]

    def _copied(self, entry: Entry) -> Entry:
        if entry.constant is None and (entry.target is None or (entry.has_effect and not self._is_new(entry))):
            raise UnsupportedError(self._missing(entry))
        copy = Entry(entry.target, map_entries(entry.args, self._of), map_entries(entry.kwargs, self._of), entry.spec)
        copy.constant, copy.has_effect = entry.constant, entry.has_effect
        copy.origin, copy.sequence_nr, copy.recompute = entry.origin, entry.sequence_nr, entry.recompute
        # What only the backward reads stays there, though an earlier backward on the tape has computed it too: the next
        # derivative may want what it is computed from.
        copy.is_backward = self.in_backward
        return copy

    def add_sizes(self) -> None:
        """Inputs for the sizes that are used and that no other input has: saved ones."""
        used = {
            s for copy in self.copies.values() for n in _numbers_in((copy.args, copy.kwargs)) for s in symbols_in(n)
        }
        known = {info.symbol for info in symbols_of_inputs(self.inputs()[0], {})}
        for place, number in self.given.sizes:
            symbol = symbol_of(number)
            if symbol in used - known:
                known.add(symbol)
                entry = Entry(None)
                self.sizes[id(entry)] = number
                self.sources.append((place, Saved(str(symbol)), entry, None, entry))

    def numbers(self) -> dict[int, Any]:
        """The symbolic numbers that copies are."""
        known = self.recorder.decisions.numbers.by_entry
        found = {
            id(copy): known[id(first)]
            for number, copy in self.copies.items()
            if id(first := self.numbering.first[number]) in known
        }
        return found | self.sizes

    def _of(self, entry: Entry) -> Entry:
        return self.copies[self.numbering.of(entry)]

    def _position(self, entry: Entry) -> int:
        return self.numbering.position(self.numbering.of(entry))

    def _is_new(self, entry: Entry) -> bool:
        return self._position(entry) >= self.given.start

    def _missing(self, entry: Entry) -> str:
        origin, name = self.given.origin, self.session.name
        what = "a random number"
        for known, slot in zip(origin.inputs, origin.input_slots, strict=True):
            if known is entry:
                what = f"the value of {slot}"
        return (
            f"`{name}` was differentiated with create_graph=True, or for a gradient of another kind than its result, "
            f"and that derivative needs {what}, which the partition in use does not save. Compile it with "
            "partition='default', or compute the inner gradient inside the compiled function with "
            "torch.autograd.grad(..., create_graph=True)."
        )

    def drop_unused(self, with_gradients: set[int]) -> None:
        """Leave out inputs of the function that nothing is computed from: what they hold may be let go by then.

        `with_gradients`: the ids of the leaves that get one.
        """
        if not self.recorder.is_symbolic:  # their sizes may be asked for
            self.sources = [
                (place, slot, original, leaf, copy)
                for place, slot, original, leaf, copy in self.sources
                if place.kind != "input" or id(leaf) in with_gradients or self.numbering.of(original) in self.used
            ]

    def inputs(self) -> tuple[list[Entry], list[ValueRef], list[Slot], list[Entry], list[torch.Tensor | None]]:
        """The graph's inputs: placeholders, where they are found, slots, entries on the tape, leaves."""
        used = self.used | {saved for number, (_, saved) in self.undone.items() if number in self.used}
        rows = [*self.sources, *(row for number, row in self.saved.items() if number in used)]
        return (
            [row[4] for row in rows],
            [row[0] for row in rows],
            [row[1] for row in rows],
            [row[2] for row in rows],
            [row[3] for row in rows],
        )

    def tape(self) -> tuple[Tape, list[tuple[Entry, Entry]]]:
        """The copies in the order of the tape, and the random ones with what they are copies of."""
        tape, random = Tape(self.recorder.tape.origins), []
        for copy, _ in self.undone.values():
            tape.append(copy)
        for number in sorted(self.copies.keys() - self.undone.keys()):
            copy, first = self.copies[number], self.numbering.first[number]
            tape.append(copy)
            if copy.has_effect:
                random.append((copy, first))
        return tape, random


def _numbers_in(value: Any) -> Iterator[Any]:
    """The symbolic numbers in arguments."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, dict):
        yield from _numbers_in(tuple(value.values()))
    elif is_symbolic(value):
        yield value
