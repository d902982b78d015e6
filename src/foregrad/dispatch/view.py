"""The public view of a compiled function: `foregrad.extend.view`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from ..extend import EffectView, GraphView, GuardView, TensorView
from ..graph.effect_log import Effect, SetData, Write
from ..graph.meta import TensorSpec
from ..graph.signature import Handle, InputInfo, Signature
from ..graph.slots import Buffer, Closure, Param, SharedMemory
from .graphs import Specialization
from .guard_list import STATE

_ADDRESS = re.compile(r" \(at 0x[0-9a-f]+\)")


def graph_view(specialization: Specialization) -> GraphView:
    """One compiled graph, in the user's names."""
    joint = specialization.product.captured.joint
    signature = joint.signature
    has = signature.gradients.returned if not signature.is_inference else [False] * len(signature.inputs)
    return GraphView(
        joint,
        specialization.product.compiled.partitioned,
        tuple(_place(info, has_gradient=gradient) for info, gradient in zip(signature.inputs, has, strict=True)),
        tuple(_outputs(signature)),
        tuple(_effects(signature)),
        tuple(_aliases(signature)),
        tuple(_guards(specialization)),
        specialization.source(),
    )


def _place(info: InputInfo, *, has_gradient: bool = False) -> TensorView:
    slot = info.slot
    kind = {Param: "parameter", Buffer: "buffer", Closure: "closed over"}.get(type(slot), "argument")
    if info.argument is None and kind == "argument":
        kind = "closed over"
    if info.number is not None:
        kind = "number"
    name = getattr(slot, "name", None) or getattr(slot, "path", None) or str(slot)
    return TensorView(str(name), kind, info.spec, info.requires_grad, has_gradient)


def _outputs(signature: Signature) -> Iterator[TensorView]:
    for output in signature.structure.outputs:
        if isinstance(output, Handle) and output.steps:
            yield TensorView(output.path, "view", note=_base(output, signature))
        elif isinstance(output, Handle) and output.output is not None:
            has_gradients = output.output in signature.gradients.differentiable
            spec = signature.graph_outputs.specs[output.output]
            yield TensorView(output.path, "result", spec, has_gradients, has_gradients)
        elif isinstance(output, Handle):
            yield TensorView(output.path, "an input", note=_base(output, signature))
        elif isinstance(value := getattr(output, "value", None), (bool, int, float, str)):
            yield TensorView(output.path, "constant", note=repr(value)[:80])


def _effects(signature: Signature) -> Iterator[EffectView]:
    seen: dict[tuple[str, str], None] = {}
    for effect in signature.effects.log:
        if 0 <= effect.input < len(signature.inputs):
            seen.setdefault((str(signature.inputs[effect.input].slot), _what(effect)))
    for name, what in seen:
        yield EffectView("tensor", name, what)
    for call_effect in signature.effects.around:
        name = signature.name_of(call_effect)
        what = re.sub(r" (on|of) (input|result) \d+", "", str(call_effect), count=1) if name else str(call_effect)
        yield EffectView("tensor" if name else "call", name, what)
    for write in signature.effects.python_writes:
        yield EffectView("python", write.path, re.sub("([A-Z])", r" \1", type(write).__name__).strip().lower())


def _what(effect: Effect) -> str:
    if isinstance(effect, Write):
        where = "the function writes to a view" if effect.steps else "written"
        return f"{where}, with gradients" if effect.differentiable else where
    if isinstance(effect, SetData):
        return "takes the memory of a second tensor"
    return re.sub(r"\(?\)? ?(on|of) input \d+", "", str(effect)).strip()


def _aliases(signature: Signature) -> Iterator[EffectView]:
    for output in signature.structure.outputs:
        if isinstance(output, Handle) and (output.steps or output.input is not None):
            what = "is a view of" if output.steps else "is"
            yield EffectView("tensor", output.path, f"{what} {_base(output, signature)}")
    for memory, others in signature.structure.shared_memory:
        names = " and ".join(str(signature.inputs[i].slot) for i in others)
        slot = signature.inputs[memory].slot
        what = "share memory" if isinstance(slot, SharedMemory) else f"share the memory of {slot}"
        yield EffectView("tensor", names, what)


def _base(output: Handle, signature: Signature) -> str:
    if output.input is not None:
        return str(signature.inputs[output.input].slot)
    return str(signature.graph_outputs.slots[output.output or 0])


def _guards(specialization: Specialization) -> Iterable[GuardView]:
    signature = specialization.product.captured.joint.signature
    said = [*specialization.guards.descriptions()]
    reached = {str(info.slot) for info in signature.inputs if info.argument is None}
    for name, fact, expected in said:
        if name not in reached and fact in ("", "dtype", "shape", "device", "requires_grad", "stride()"):
            yield GuardView("argument", f"{name}.{fact}" if fact else name, expected)
    for symbol in signature.symbols:
        place = "" if symbol.dim is None else f".shape[{symbol.dim}]"
        yield GuardView("size", f"{signature.inputs[symbol.input].slot}{place}", f"any {symbol.symbol}")
    for decision in signature.stops.decisions:
        yield GuardView("value", decision.where, "any" if decision.symbol is not None else repr(decision.value))
    for info in signature.inputs:
        if info.argument is None and isinstance(info.spec, TensorSpec):
            yield GuardView(_place(info).kind, str(info.slot), repr(info.spec))
    for name, fact, expected in said:
        if name == STATE and (not fact.startswith("autocast ") or expected == "True"):
            yield GuardView("setting", fact, expected)
    yield from _looked_at(specialization)


def _looked_at(specialization: Specialization) -> Iterator[GuardView]:
    """Values that the function read in Python: plain ones first, then objects known by identity."""
    later = []
    for place in specialization.watch.places:
        for key, expected in place.items.items():
            name = place.path(key) or place.name
            if expected.kind == "tensor" or not name:
                continue
            guard = GuardView("read", name, _ADDRESS.sub("", _short(expected)))
            if expected.kind == "equal":
                yield guard
            else:
                later.append(guard)
    yield from later


def _short(expected: Any) -> str:
    text = str(expected.describe())
    return text if len(text) <= 100 else text[:97] + "..."
