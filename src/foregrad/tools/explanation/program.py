"""The program as it was captured: inputs, results, writes, shared memory, reads and guards."""

from __future__ import annotations

from typing import Any

from foregrad.extend import GraphView, TensorView
from foregrad.partitioners import value_bytes

from .measure import Subject
from .tree import CapturedProgram, Fact, FoundGuard, Place

_MOST_GUARDS = 3_000


def program_of(graph: GraphView) -> CapturedProgram:
    """The program of a compiled graph, in the user's names."""
    has_backward = not graph.joint.signature.is_inference
    trained = [place for place in graph.inputs if place.requires_grad and place.kind in ("parameter", "buffer")]
    effects = (Fact(e.name, f"Python: {e.what}" if e.kind == "python" else e.what) for e in graph.effects)
    return CapturedProgram(
        inputs=tuple(_place(place) for place in graph.inputs if place.is_argument),
        outputs=tuple(_result(place) for place in graph.outputs),
        outside=tuple(_place(place) for place in graph.inputs if not place.is_argument),
        mutated=tuple(effects),
        aliased=tuple(
            Fact(alias.name, alias.what) for alias in graph.aliases if f"base of {alias.name}" not in alias.what
        ),
        unused=tuple(place.name for place in trained if has_backward and not place.has_gradient),
        guards=tuple(FoundGuard(g.kind, g.name, g.expected) for g in graph.guards[:_MOST_GUARDS]),
        has_backward=has_backward,
    )


def _place(place: TensorView) -> Place:
    note = "requires grad" if place.requires_grad else place.note
    size = "" if place.spec is None else repr(place.spec)
    return Place(place.name, place.kind, size, _bytes(place), note)


def _result(place: TensorView) -> Place:
    if place.kind == "constant":
        return Place(place.name, place.kind, place.note, 0)
    if place.spec is None:
        return Place(place.name, place.kind, "", 0, place.note)
    return Place(place.name, place.kind, repr(place.spec), _bytes(place), "has gradients" if place.has_gradient else "")


def _bytes(place: TensorView) -> Any:
    return 0 if place.spec is None else value_bytes(place.spec)


def written_outside(graph: GraphView, subject: Subject) -> str | None:
    """Something that a call writes to and that is no copy, by its name: running the copies would change it."""
    signature = graph.joint.signature
    for number in signature.changed_inputs:
        info = signature.inputs[number]
        if info.argument is None and info.source is not None:
            try:
                tensor = info.source.get()
            except Exception:
                return str(info.slot)
            if not subject.is_own(tensor):
                return str(info.slot)
    for write in signature.effects.python_writes:
        if not (write.is_print or subject.is_own(write.target) or write.is_to_argument):  # prints are dropped here
            return write.path
    return None


def writes_to_arguments(graph: GraphView) -> bool:
    """Whether a call leaves its arguments otherwise than it found them."""
    signature = graph.joint.signature
    return (
        any(signature.inputs[i].argument is not None for i in signature.changed_inputs)
        or any(effect.input >= len(signature.inputs) for effect in signature.effects.log)
        or bool(signature.structure.shared_memory)
        or any(write.is_to_argument for write in signature.effects.python_writes)
    )
