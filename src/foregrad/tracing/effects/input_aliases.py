"""Views of inputs: from which input, since which of the memories that it was given, by which steps."""

from __future__ import annotations

from ..._torch.stand_ins import is_stand_in
from ...graph.effect_log import Handle
from ..heap.alias import Value
from ..heap.records import InputRecord
from ..heap.refusals import of_exchanged_memory
from ..heap.view_chain import chain_of
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from .analysis import Analysis, Start
from .gradient_looks import changes_look
from .output_alias_sets import BaseOutput, as_it_was
from .steps import early_steps, steps_between

__all__ = ["alias_of_input", "memory_of", "observed_swaps", "start_of"]


def observed_swaps(
    recorder: Recorder, inputs: Inputs, replaced: list[int], leaves: list[object]
) -> list[tuple[int, int]]:
    """(input, number of a swap) of those that somebody sees: the last of each input, and those that outputs, or the
    memory that comes by another one, are views since.
    """
    log, records = recorder.changes.log, inputs.records
    swaps = {index: log.swaps_of(records[index].stand_in) for index in replaced}
    number = {id(event.after): (index, at) for index, events in swaps.items() for at, event in enumerate(events)}
    fakes = [leaf for leaf in leaves if is_stand_in(leaf) and id(leaf) in recorder.values]
    waiting = [recorder.value_of(fake) for fake in fakes]
    waiting += [old for old, _ in recorder.changes.replaced.values()]
    found = {(index, len(events) - 1) for index, events in swaps.items()}
    looking = [index for index in swaps if changes_look(recorder, records[index])]
    found |= {(index, at) for index in looking for at in range(len(swaps[index]))}
    waiting += [event.after for events in swaps.values() for event in events[-1:]]  # type: ignore[misc]
    seen: set[int] = set()
    while waiting:
        for value in chain_of(waiting.pop()):
            if id(value) not in seen:
                seen.add(id(value))
                if id(value) in number:
                    found.add(number[id(value)])
    return sorted(found)


def start_of(recorder: Recorder, inputs: Inputs, analysis: Analysis, value: Value) -> tuple[Value, Start] | None:
    """The nearest tensor on the way from a value to its root that is an input's, or was; None where there is none."""
    if len(analysis.starts_of) != len(inputs.records):
        analysis.starts = _starts(recorder, inputs.records)
        analysis.starts_of = tuple(map(id, inputs.records))
    at: Value | None = value
    while at is not None and id(at) not in analysis.starts:
        at = at.parent
    return None if at is None else (at, analysis.starts[id(at)])


def _starts(recorder: Recorder, records: list[InputRecord]) -> dict[int, Start]:
    starts: dict[int, Start] = {}
    for index, record in enumerate(records):
        current = recorder.values[id(record.stand_in)]
        swaps = recorder.changes.log.swaps_of(record.stand_in)
        begins = {id(event.after) for event in swaps}
        for epoch, first in enumerate([record.initial, *(event.after for event in swaps)]):
            until = swaps[epoch].at if epoch < len(swaps) else 0
            was: Value | None = first
            while was is not None and (was is first or id(was) not in begins) and was.storage is first.storage:  # type: ignore[union-attr]
                starts.setdefault(id(was), Start(index, was is current, epoch, until))
                was = was.became
    return starts


def alias_of_input(
    recorder: Recorder, inputs: Inputs, analysis: Analysis, value: Value, path: str, *, at_last: bool = False
) -> Handle | None:
    """A view of an input, from what the input is after the call; `at_last`: all of its steps are taken then."""
    found = start_of(recorder, inputs, analysis, value)
    if found is None:
        return None
    at, start = found
    steps = steps_between(value, at)
    record = inputs.records[start.input]
    early = {} if at_last else early_steps(value, at, record, recorder, start.until)
    analysis.early |= {(start.input, call): taken for call, taken in early.items()}
    if start.epoch:
        analysis.of_swapped |= {(start.input, step.call) for step in steps[:1]}
    # The input's own sizes have changed since: start from the memory layout it had. One to be replaced still has it.
    if not start.is_current and not early and (start.input not in analysis.replaced or not steps):
        steps = (as_it_was(at), *steps)
    return Handle(path, start.input, None, steps)


def memory_of(
    recorder: Recorder, inputs: Inputs, analysis: Analysis, bases: dict[int, BaseOutput], value: Value, path: str
) -> Handle:
    """The memory that a tensor took over, which is `value` since."""
    if value.parent is not None:
        found = start_of(recorder, inputs, analysis, value.parent)
        if found is not None:
            at, start = found
            steps = steps_between(value, at)
            early = early_steps(value, at, inputs.records[start.input], recorder, start.until)
            analysis.early |= {(start.input, call): taken for call, taken in early.items()}
            return Handle(path, start.input, None, steps)
    if value.storage.is_input:
        raise of_exchanged_memory(path)
    base = bases[id(value.storage)]
    return Handle(path, None, base.output, (*base.back, *steps_between(value, base.value)))
