"""Wrapper subclasses and their histories: those of inputs that are written to with gradients, and gradients that pass
through one on their way inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._torch.tensors import base_of, history_of, is_view
from ...graph.effect_log import WriteWrapper
from ...graph.signature import PassedWrapper, WrapperPlace
from ...graph.slots import Updated
from ...identity import ById, IdSet
from ...subclasses.spec import is_wrapper
from ..heap.refusals import changed_wrapper, returned_wrapper
from ..inputs.inputs import Inputs
from ..tape.gradient_paths import passed_through
from .analysis import Analysis


def add_wrapper_histories(analysis: Analysis) -> None:
    """Graph outputs with the histories that wrappers among the inputs have by now.

    Those of plain tensors that are written anyhow are these.
    """
    updates = {update.input: update.output for update in analysis.updates}
    inputs = analysis.inputs
    number = ById((record.stand_in, i) for i, record in enumerate(inputs.records))
    for wrapper, known in inputs.wrappers.rewritten():
        _check_alone(inputs, known)
        spec, parts = inputs.wrappers.apart(known.stand_in)
        outputs = []
        for place in spec.carrying():
            own = number[known.parts[min(place, len(known.parts) - 1)]]
            output = updates.get(own) if place < len(spec.carries) else None
            if output is None:
                value = analysis.recorder.value_of(parts[place])
                slot = Updated(inputs.records[own].slot)
                output = analysis.add(slot, value.read(analysis.recorder.emit), value.spec, parts[place])
            else:
                analysis.fakes[output] = parts[place]
            outputs.append(output)
        analysis.wrapper_histories.append(WriteWrapper(wrapper, 0, spec, tuple(outputs)))


def _check_alone(inputs: Inputs, known: Any) -> None:
    """Raise where a wrapper that has another history now shares memory with another that gradients go through."""
    storages = {inputs.by_stand_in[part].initial.storage for part in known.parts}
    for other in inputs.wrappers.inputs:
        if other is known or not other.spec.requires_grad:
            continue
        if any(inputs.by_stand_in[part].initial.storage in storages for part in other.parts):
            raise changed_wrapper(
                f"the function writes with gradients to a {known.spec.cls.__qualname__} that shares memory with another"
            )


def passed_wrappers(analysis: Analysis, differentiable: Sequence[int]) -> tuple[PassedWrapper, ...]:
    """The wrappers that others were computed from, inside."""
    targets = list(_targets(analysis))
    if not targets:
        return ()
    fakes: list[Any] = [analysis.fakes[i] for i in differentiable]
    _, passed = passed_through(fakes, [(at, tensor) for at, (_, tensor, _) in enumerate(targets)])
    found, places = [], _places(analysis)
    for at, positions in passed:
        place, tensor, own = targets[at]
        after = tuple(position for position in positions if differentiable[position] not in own)
        others = dict.fromkeys(places.get(differentiable[position]) for position in after)
        others.pop(place, None)
        if after and (place is None or None in others):
            raise returned_wrapper(
                f"results are computed from a {type(tensor).__qualname__} that is given back too, and one of them is "
                "left in an object"
            )
        if after and place is not None:
            found.append(PassedWrapper(place, after, tuple(filter(None, others))))
    return tuple(sorted(found, key=lambda one: -len(one.after)))


def _targets(analysis: Analysis) -> Iterator[tuple[WrapperPlace | None, Any, frozenset[int]]]:
    """The wrappers that the caller sees whose histories are the call's: where, and their own graph outputs."""
    wrappers = analysis.inputs.wrappers
    own = _own_outputs(analysis)
    seen: IdSet[Any] = IdSet()
    for at, leaf in enumerate(wrappers.leaves):
        if is_wrapper(leaf) and leaf not in seen and leaf not in wrappers.by_stand_in:
            seen.add(leaf)
            if leaf.requires_grad and history_of(leaf) is not None:
                yield WrapperPlace("result", at), leaf, own.get(leaf, frozenset())
    bases = IdSet(base_of(leaf) for leaf in wrappers.leaves if is_wrapper(leaf) and is_view(leaf))
    for made in wrappers.made:
        if made not in seen and made not in bases and own[made]:
            yield None, made, own[made]
    for history in analysis.wrapper_histories:
        stand_in = wrappers.inputs[history.input].stand_in
        yield WrapperPlace("wrapper", history.input), stand_in, frozenset(history.outputs)


def wrapper_results(analysis: Analysis) -> tuple[tuple[WrapperPlace, frozenset[int]], ...]:
    """Where wrappers are that are made of graph outputs which carry gradients, and of which."""
    own = _own_outputs(analysis)
    found: dict[WrapperPlace, frozenset[int]] = {}
    for at, leaf in enumerate(analysis.inputs.wrappers.leaves):
        if is_wrapper(leaf):
            outputs = own.get(base_of(leaf) if is_view(leaf) else leaf)
            if outputs and outputs not in found.values():
                found[WrapperPlace("result", at)] = outputs
    return tuple(found.items())


def _own_outputs(analysis: Analysis) -> ById[Any, frozenset[int]]:
    """By a wrapper that is made of them: graph outputs that carry gradients."""
    outputs = ById((fake, i) for i, fake in enumerate(analysis.fakes) if fake is not None)
    made = analysis.inputs.wrappers.made.items()
    return ById((one, frozenset(outputs[part] for part in parts if part in outputs)) for one, parts in made)


def _places(analysis: Analysis) -> dict[int, WrapperPlace]:
    """By graph output: where what is made of it is found after the call."""
    written = [update for update in analysis.updates if update.differentiable]
    places = {update.output: WrapperPlace("input", update.input) for update in written}
    outputs = ById((fake, i) for i, fake in enumerate(analysis.fakes) if fake is not None)
    own = _own_outputs(analysis)
    for at, leaf in enumerate(analysis.inputs.wrappers.leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        for tensor in (leaf, base_of(leaf)) if is_view(leaf) else (leaf,):
            made_of = own.get(tensor, outputs.get(tensor))
            for output in made_of if isinstance(made_of, frozenset) else () if made_of is None else (made_of,):
                places.setdefault(output, WrapperPlace("result", at, tensor is not leaf))
    for history in analysis.wrapper_histories:
        places |= dict.fromkeys(history.outputs, WrapperPlace("wrapper", history.input))
    return places
