"""The program as it was captured: inputs, results, writes, shared memory, reads and guards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from ..dispatch.graphs import Specialization
from ..dispatch.guard_list import STATE
from ..graph.effect_log import Effect, SetData, Write
from ..graph.meta import TensorSpec
from ..graph.python_effects import CONSOLE, OfArgument
from ..graph.signature import Handle, InputInfo, Signature
from ..graph.slots import Buffer, Closure, Param
from ..partitioners.index import value_bytes
from .measure import Subject
from .tree import Fact, Guard, Place, Program

_MOST_GUARDS = 3_000
_ADDRESS = re.compile(r" \(at 0x[0-9a-f]+\)")


def program_of(specialization: Specialization) -> Program:
    """The program of a specialization, in the user's names."""
    signature = specialization.product.captured.joint.signature
    inputs = tuple(_place(info) for info in signature.inputs)
    reached = [info.argument is None for info in signature.inputs]
    kinds = ("parameter", "buffer")
    return Program(
        inputs=tuple(place for place, is_reached in zip(inputs, reached, strict=True) if not is_reached),
        outputs=tuple(_outputs(signature)),
        outside=tuple(place for place, is_reached in zip(inputs, reached, strict=True) if is_reached),
        mutated=tuple(_mutated(signature)),
        aliased=tuple(_aliased(signature)),
        unused=tuple(
            place.name
            for place, info, has in zip(inputs, signature.inputs, signature.gradients, strict=True)
            if info.requires_grad and not has and place.kind in kinds and not signature.is_inference
        ),
        guards=tuple(_guards(specialization))[:_MOST_GUARDS],
        has_backward=not signature.is_inference,
    )


def written_outside(specialization: Specialization, subject: Subject) -> str | None:
    """Something that a call writes to and that is no copy, by its name: running the copies would change it."""
    signature = specialization.product.captured.joint.signature
    for effect in signature.log:
        if not 0 <= effect.input < len(signature.inputs):
            continue
        info = signature.inputs[effect.input]
        if info.argument is None and info.source is not None:
            try:
                tensor = info.source.get()
            except Exception:
                return str(info.slot)
            if not subject.is_own(tensor):
                return str(info.slot)
    for write in signature.python_writes:
        is_print = write.target is CONSOLE and getattr(write, "name", "") == "print"  # dropped while we measure
        if not (is_print or subject.is_own(write.target) or isinstance(write.target, OfArgument)):
            return write.path
    return None


def writes_to_arguments(specialization: Specialization) -> bool:
    """Whether a call leaves its arguments otherwise than it found them."""
    signature = specialization.product.captured.joint.signature
    numbers = [effect.input for effect in signature.log]
    return (
        any(i >= len(signature.inputs) or (i >= 0 and signature.inputs[i].argument is not None) for i in numbers)
        or bool(signature.shared_memory)
        or any(isinstance(write.target, OfArgument) for write in signature.python_writes)
    )


def _place(info: InputInfo) -> Place:
    slot = info.slot
    kind = {Param: "parameter", Buffer: "buffer", Closure: "closed over"}.get(type(slot), "argument")
    if info.number is not None:
        kind = "number"
    name = getattr(slot, "name", None) or getattr(slot, "path", None) or str(slot)
    note = "requires grad" if info.requires_grad else ""
    return Place(str(name), kind, repr(info.spec), value_bytes(info.spec), note)


def _outputs(signature: Signature) -> Iterator[Place]:
    for output in signature.outputs:
        if isinstance(output, Handle) and output.steps:
            yield Place(output.path, "view", "", 0, _base(output, signature))
        elif isinstance(output, Handle) and output.output is not None:
            spec = signature.graph_output_specs[output.output]
            note = "has gradients" if output.output in signature.differentiable else ""
            yield Place(output.path, "result", repr(spec), value_bytes(spec), note)
        elif isinstance(output, Handle):
            yield Place(output.path, "an input", "", 0, _base(output, signature))
        elif isinstance(value := getattr(output, "value", None), (bool, int, float, str)):
            yield Place(output.path, "constant", repr(value)[:80], 0)


def _mutated(signature: Signature) -> Iterator[Fact]:
    seen: dict[tuple[str, str], None] = {}
    for effect in signature.log:
        if 0 <= effect.input < len(signature.inputs):
            name = str(signature.inputs[effect.input].slot)
            seen.setdefault((name, _what(effect)))
    for name, what in seen:
        yield Fact(name, what)
    for write in signature.python_writes:
        words = re.sub("([A-Z])", r" \1", type(write).__name__).strip().lower()
        yield Fact(write.path, f"Python: {words}")


def _what(effect: Effect) -> str:
    if isinstance(effect, Write):
        where = "a view of it is written" if effect.steps else "written"
        return f"{where}, with gradients" if effect.differentiable else where
    if isinstance(effect, SetData):
        return "takes the memory of another tensor"
    return re.sub(r"\(?\)? ?(on|of) input \d+", "", str(effect)).strip()


def _aliased(signature: Signature) -> Iterator[Fact]:
    for output in signature.outputs:
        if isinstance(output, Handle) and output.steps:
            yield Fact(output.path, f"is a view of {_base(output, signature)}")
        elif isinstance(output, Handle) and output.input is not None:
            yield Fact(output.path, f"is {_base(output, signature)}")
    for memory, others in signature.shared_memory:
        yield Fact(
            " and ".join(str(signature.inputs[i].slot) for i in others),
            f"share memory, which is {signature.inputs[memory].slot}",
        )


def _base(output: Handle, signature: Signature) -> str:
    if output.input is not None:
        return str(signature.inputs[output.input].slot)
    return str(signature.graph_outputs[output.output or 0])


def _guards(specialization: Specialization) -> Iterable[Guard]:
    signature = specialization.product.captured.joint.signature
    said = [*specialization.guards.descriptions()]
    reached = {str(info.slot) for info in signature.inputs if info.argument is None}
    for name, fact, expected in said:
        if name not in reached and fact in ("", "dtype", "shape", "device", "requires_grad", "stride()"):
            yield Guard("argument", f"{name}.{fact}" if fact else name, expected)
    for symbol in signature.symbols:
        place = "" if symbol.dim is None else f".shape[{symbol.dim}]"
        yield Guard("size", f"{signature.inputs[symbol.input].slot}{place}", f"any {symbol.symbol}")
    for decision in signature.decisions:
        yield Guard("value", decision.where, "any" if decision.symbol is not None else repr(decision.value))
    for info in signature.inputs:
        if info.argument is None and isinstance(info.spec, TensorSpec):
            yield Guard(_place(info).kind, str(info.slot), repr(info.spec))
    for name, fact, expected in said:
        if name == STATE and (not fact.startswith("autocast ") or expected == "True"):
            yield Guard("setting", fact, expected)
    yield from _reads(specialization)


def _reads(specialization: Specialization) -> Iterator[Guard]:
    """Values that the function read in Python: plain ones first, then objects known by identity."""
    later = []
    for place in specialization.watch.places:
        for key, expected in place.items.items():
            name = place.path(key) or place.name
            if expected.kind == "tensor" or not name:
                continue
            guard = Guard("read", name, _ADDRESS.sub("", _short(expected)))
            if expected.kind == "equal":
                yield guard
            else:
                later.append(guard)
    yield from later


def _short(expected: Any) -> str:
    text = str(expected.describe())
    return text if len(text) <= 100 else text[:97] + "..."
