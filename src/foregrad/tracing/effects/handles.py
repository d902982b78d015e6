"""Handles: the input or graph output that a tensor is a view of, and the view's steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..._torch.tensors import allows_writes, base_of, is_usable, is_view
from ...graph.effect_log import Handle, MarkRequiresGrad, Recorded, SetData, TakeView, ViewStep
from ..heap.alias import Storage, Value, chain_of
from ..heap.records import InputRecord, is_moved
from ..heap.refusals import of_exchanged_memory, taken_before
from ..heap.views import View
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from ..tape.opinfo import CUTS
from .results import GraphResults


@dataclasses.dataclass(frozen=True, slots=True)
class BaseOutput:
    """A value that outputs are views of, the graph output that gives it, and the steps from that to the value.

    `leaf`: it is made to require grad by itself. `tensor`: what the function knows it as, where it does.
    """

    value: Value
    output: int
    back: tuple[ViewStep, ...]
    leaf: bool = False
    tensor: torch.Tensor | None = None


@dataclasses.dataclass(slots=True)
class Placing:
    """The results of a function on their way to `Returned`. `bases`: by a storage that is no input's, the output that
    gives it. `starts`: the inputs' values. `log`: effects on inputs, results and views, each with its time.
    """

    recorder: Recorder
    inputs: Inputs
    starts: dict[Value, Start]
    graph: GraphResults = dataclasses.field(default_factory=GraphResults)
    bases: dict[Storage, BaseOutput] = dataclasses.field(default_factory=dict)
    log: list[Recorded] = dataclasses.field(default_factory=list)


# A call takes views of inputs last, after all changes to the inputs. A view that would differ by then is refused: the
# input has new memory, or its `requires_grad` changed, since the function took the view.


aten = torch.ops.aten


class Start(NamedTuple):
    """The input with that value, now or before. `is_former`: before the input was given other memory."""

    input: int
    is_former: bool


def last_swap(recorder: Recorder, record: InputRecord) -> Value:
    """What an input is since it was last given other memory."""
    after = recorder.changes.log.of(record.stand_in, SetData)[-1].after
    assert after is not None
    return after


def starts_of(recorder: Recorder, records: list[InputRecord]) -> dict[Value, Start]:
    """The values of the inputs, also before sizes changed in place or other memory was given."""
    starts: dict[Value, Start] = {}
    for index, record in enumerate(records):
        is_given = bool(recorder.changes.log.of(record.stand_in, SetData))
        was: Value | None = record.initial
        while was is not None:
            starts[was] = Start(index, is_given)
            was = None if is_given else was.became
        if is_given:
            starts[last_swap(recorder, record)] = Start(index, False)
    return starts


def _start_of(placing: Placing, value: Value | None) -> tuple[Value, Start] | None:
    """The nearest value of an input on the way from a value to its root; None without one."""
    while value is not None and value not in placing.starts:
        value = value.parent
    return None if value is None else (value, placing.starts[value])


def alias_of_input(placing: Placing, value: Value, path: str) -> Handle | None:
    """A view of an input, from what the input is after the call."""
    found = _start_of(placing, value)
    if found is None:
        return None
    at, start = found
    record = placing.inputs.records[start.input]
    if start.is_former:
        raise of_exchanged_memory(f"the output {path}", placing.recorder.changes.where(record.stand_in))
    whole = base_of(record.real)
    bases = (other.stand_in for other in placing.inputs.records if whole is not None and other.real is whole)
    check_taken(placing.recorder, value, at, (record.stand_in, *bases), path)
    steps = steps_between(value, at)
    # Several views made at once may not be used, and no view of them may be taken, once one of them is written: each
    # link is taken at its own time.
    is_barred = is_view(record.real) and not allows_writes(record.real) and is_moved(record)
    if is_barred or (value.fake is not None and not is_usable(value.fake)):
        for count, link in enumerate(_values_between(value, at), 1):
            placing.log.append(Recorded(link.born, TakeView(start.input, path, steps=steps[:count])))
    elif at is not placing.recorder.values[record.stand_in]:  # its sizes have changed since
        steps = (as_it_was(at), *steps)
    return Handle(path, start.input, None, steps)


def check_taken(recorder: Recorder, value: Value, base: Value, owners: Iterable[object], path: str) -> None:
    """Raise for a view, `value`, of `base`, if `requires_grad_()` or `detach_()` was called on a view between them, or
    on an owner after the view was taken. `owners`: the tensor that `base` was, and the one that this is a view of.
    """
    links = [base, *_values_between(value, base)]
    cut = max((at for at, link in enumerate(links) if link.view is not None and link.view.op in CUTS and at), default=0)
    for event in [event for event in recorder.changes.log.events if event.is_toggle and len(links) - cut > 1]:
        is_of_owner = any(event.tensor is owner for owner in owners) and not cut and event.at > links[1].born
        if is_of_owner or any(event.value is link for link in links[max(cut, 1) : -1]):
            raise taken_before(f"the output {path}", recorder.changes.where(event.tensor))


def memory_of(placing: Placing, value: Value, path: str) -> Handle:
    """The memory that a tensor took over, which is `value` since."""
    found = _start_of(placing, value.parent)
    if found is not None:
        at, start = found
        source = Handle(path, start.input, None, steps_between(value, at))
        if start.is_former:  # taken while the input has that memory
            first = _values_between(value, at)[0]
            placing.log.append(Recorded(first.born, TakeView(start.input, path, steps=source.steps[:1])))
        return source
    if value.storage.is_input:
        raise of_exchanged_memory(path)
    base = placing.bases[value.storage]
    return Handle(path, None, base.output, (*base.back, *steps_between(value, base.value)))


# -------------------------------------------------------------------- steps


def steps_between(value: Value, base: Value) -> tuple[ViewStep, ...]:
    """The way from `base` to `value`."""
    return tuple(_step(value) for value in _values_between(value, base))


def place_of(handle: Handle) -> dict[str, Any]:
    """The fields of an entry for the affected tensor."""
    return {"input": -1 if handle.input is None else handle.input, "result": handle.output, "steps": handle.steps}


def marked_at(recorder: Recorder, tensor: torch.Tensor, value: Value) -> int:
    """When `requires_grad_()` was last called on it; when it was made, where its maker said so."""
    return max((event.at for event in recorder.changes.log.of(tensor, MarkRequiresGrad)), default=value.born)


def _values_between(value: Value, base: Value) -> list[Value]:
    chain = chain_of(value)
    if base not in chain:
        raise of_exchanged_memory("an output")
    return chain[: chain.index(base)][::-1]


def _step(value: Value) -> ViewStep:
    view = value.view
    assert isinstance(view, View)
    return ViewStep(view.op, view.args, tuple(view.kwargs.items()), view.index, id(view.call), view.grad_enabled)


def as_it_was(value: Value) -> ViewStep:
    """The step back to the sizes `value` had, from any tensor in the same memory."""
    spec = value.spec
    where = (list(spec.shape), list(spec.stride), spec.offset)
    return ViewStep(aten.as_strided.default, where, (), None, id(value), True)
