"""Checks of graphs and signatures from a file, beyond the type of each field.

Positions must exist, graphs must write to none of their arguments, the halves must fit the joint graph. Code rendered
from a signature relies on these checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from ..._torch.ops import OpOverload
from ...errors import ArtifactError, ForegradError
from ...graph.effect_log import (
    BumpVersion,
    CheckInfo,
    Detach,
    Effect,
    Given,
    InplaceView,
    MarkRequiresGrad,
    OutputInfo,
    Result,
    SetData,
    SetStorage,
    TakeView,
    ViewStep,
    Write,
)
from ...graph.joint import JointGraph, Partitioned
from ...graph.meta import TensorSpec, spec_of
from ...graph.signature import BaseOf, Handle, MemoryOf, Signature
from ...tracing.derivatives.resumable_trace import ValueRef
from ...tracing.tape.opinfo import BY_STRIDES
from ..serialize.values import is_check, is_view


def _within(numbers: Iterable[Any], count: int, what: str) -> None:
    for number in numbers:
        if number is not None and not 0 <= number < count:
            raise ArtifactError(f"there is no {what} {number}: there are {count}")


def check_partitioned(partitioned: Partitioned) -> None:
    """Raise `ArtifactError` unless graphs and signature agree."""
    joint = partitioned.joint
    for module in (joint.module, partitioned.forward, partitioned.backward):
        for node in module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op == "call_function" and schema is not None and schema.is_mutable:
                raise ArtifactError(f"{node.name} = {node.target} writes to its arguments")
            if node.target in BY_STRIDES:
                _check_strides(node)
    _check_signature(joint)
    try:
        joint.check()
        if joint.signature.is_inference or joint.backward_error is not None:
            _check_forward_alone(partitioned)
        else:
            partitioned.check()
    except (ForegradError, RuntimeError) as error:
        raise ArtifactError(f"its graphs don't fit together: {error}") from None
    if any(not hasattr(node, "name") for node in partitioned.saved_nodes):
        raise ArtifactError("the forward saves a result that is no value")


def _check_strides(node: Any) -> None:
    """Raise `ArtifactError` for a view by strides that is negative, or outside of memory that the graph itself makes.
    The memory of an input is checked at the call.
    """
    parameters = node.target._schema.arguments
    arguments = {a.name: value for a, value in zip(parameters, node.args, strict=False)} | node.kwargs
    start, sizes, strides = arguments.get("storage_offset"), arguments.get("size", ()), arguments.get("stride", ())
    numbers = (*sizes, *strides, *(() if start is None else (start,)))
    if len(sizes) != len(strides) or any(type(number) is int and number < 0 for number in numbers):
        raise ArtifactError(f"{node.name} takes memory by strides that don't go with its sizes, or are negative")
    taken: Any = arguments.get("self")
    root = taken
    while isinstance(root, fx.Node) and root.op == "call_function" and is_view(root.target):
        root = root.args[0]
    if not isinstance(root, fx.Node) or root.op != "call_function":
        return
    whole, part = spec_of(root), spec_of(taken)
    if not isinstance(whole, TensorSpec) or not isinstance(part, TensorSpec):
        return
    start = part.offset if start is None else start
    if all(type(number) is int for number in (*numbers, start)) and whole.is_static and whole.is_dense and all(sizes):
        last = start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if (last + 1) * part.dtype.itemsize > whole.nbytes:
            raise ArtifactError(f"{node.name} takes more memory than {root.name} has")


def _check_forward_alone(partitioned: Partitioned) -> None:
    signature = partitioned.joint.signature
    nodes = list(partitioned.forward.graph.nodes)
    takes = sum(node.op == "placeholder" for node in nodes)
    if takes != len(signature.inputs) or len(nodes[-1].args[0]) != signature.num_forward_outputs:
        raise ArtifactError("the forward's inputs and outputs differ from the signature")


def _check_signature(joint: JointGraph) -> None:
    s: Signature = joint.signature
    inputs, outputs, differentiable = len(s.inputs), s.num_forward_outputs, len(s.gradients.differentiable)
    if (
        len(s.graph_outputs.specs) != outputs
        or len(s.gradients.tangent_specs) != differentiable
        or len(s.gradients.returned) != inputs
    ):
        raise ArtifactError("a signature with lists of different lengths")
    if s.gradients.reached_from and len(s.gradients.reached_from) != inputs:
        raise ArtifactError("a signature with gradient paths that do not match its inputs")
    for info in s.inputs:
        if isinstance(info.source, (BaseOf, MemoryOf)):
            _within([info.source.input], inputs, "input")
            if isinstance(s.inputs[info.source.input].source, (BaseOf, MemoryOf)):
                raise ArtifactError("the base of a base")
    for whole, members in s.structure.shared_memory:
        _within((whole, *members), inputs, "input")
        if not isinstance(s.inputs[whole].source, MemoryOf):
            raise ArtifactError("shared memory in an input that is no whole memory")
    _within(s.gradients.differentiable, outputs, "output")
    _within((*s.graph_outputs.runtime_views, *s.gradients.rootless), outputs, "output")
    for effect in s.effects.log:
        _check_effect(effect, inputs, outputs)
    for call_effect in s.effects.around:
        if not call_effect.storable:
            raise ArtifactError(f"an effect that artifacts don't hold: {type(call_effect).__name__}")
        call_effect.check(_Bounds(s))
    _within((*s.effects.counted_along, *s.gradients.arrival), inputs, "input")
    _within(s.gradients.hooked_inside, len(s.structure.outputs), "result")
    _within((d.output for d in s.stops.decisions), outputs, "output")
    _within((symbol.input for symbol in s.symbols), inputs, "input")
    for symbol in s.symbols:
        _within([symbol.dim], len(s.inputs[symbol.input].spec.shape), "dimension")
    for position, after in s.gradients.passed:
        _within((position, *after), differentiable, "differentiable output")
    for at, after in s.gradients.passed_aliases:
        _within([at], len(s.structure.outputs), "result")
        _within(after, differentiable, "differentiable output")
    for reach in s.gradients.reached_from:
        _within((*reach.outputs, *reach.custom), differentiable, "differentiable output")
    _within(joint.failing, differentiable, "differentiable output")
    _within(joint.raising, outputs, "graph output")
    for result in s.structure.outputs:
        _check_output(result, inputs, outputs)
    if s.structure.output_spec is not None and (
        not hasattr(s.structure.output_spec, "size") or s.structure.output_spec.size != len(s.structure.outputs)
    ):
        raise ArtifactError("a result with more or fewer leaves than its container")
    effects = s.backward
    _within(effects.live, inputs, "input")
    for late in effects.updates:
        _within([late.output], len(effects.outputs), "effect")
        _within([late.live], len(effects.live), "live input")
        _within([late.tangent], max(differentiable, 1), "tangent")
    for check in s.stops.checks:
        _check_check(check, inputs, outputs)
    for check in effects.checks:
        _check_check(check, len(effects.live), len(effects.outputs))


class _Bounds:
    def __init__(self, signature: Signature) -> None:
        self.signature = signature

    def inputs(self, numbers: Iterable[int]) -> None:
        _within(numbers, len(self.signature.inputs), "input")

    def outputs(self, numbers: Iterable[int]) -> None:
        _within(numbers, self.signature.num_forward_outputs, "output")

    def results(self, numbers: Iterable[int]) -> None:
        _within(numbers, len(self.signature.structure.outputs), "result")


def _check_check(check: CheckInfo, inputs: int, outputs: int) -> None:
    if not is_check(check.op):
        raise ArtifactError("a check that is no operator")
    stack: list[Any] = [*check.args, *(value for _, value in check.kwargs)]
    while stack:
        value = stack.pop()
        if isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, Given):
            _within([value.input], inputs, "input")
        elif isinstance(value, Result):
            _within([value.output], outputs, "output")


_EFFECTS = TakeView, MarkRequiresGrad, Detach, Write, InplaceView, BumpVersion, SetData, SetStorage


def _check_effect(effect: Effect, inputs: int, outputs: int) -> None:
    if type(effect) not in _EFFECTS:
        raise ArtifactError("an effect of an unknown kind")
    _check_handle(effect.input if effect.result is None else None, effect.result, effect.steps, inputs, outputs)
    if isinstance(effect, Write):
        _within([effect.output], outputs, "output")
    if isinstance(effect, SetData):
        _check_output(effect.source, inputs, outputs)
    if isinstance(effect, InplaceView) and (not isinstance(effect.op, OpOverload) or effect.op.namespace != "aten"):
        raise ArtifactError("an in-place change by something that is no operator")


def _check_output(info: OutputInfo, inputs: int, outputs: int) -> None:
    if isinstance(info, Handle):
        _check_handle(info.input, info.output, info.steps, inputs, outputs)
    elif type(info) is OutputInfo:
        raise ArtifactError("a result of an unknown kind")


def _check_handle(
    input: int | None, output: int | None, steps: tuple[ViewStep, ...], inputs: int, outputs: int
) -> None:
    if (input is None) == (output is None):
        raise ArtifactError("a handle that leads to no tensor, or to two")
    _within([input], inputs, "input")
    _within([output], outputs, "output")
    for step in steps:
        if not is_view(step.op):
            raise ArtifactError(f"a view taken by {step.op}, not a view operator")


def check_derivative(
    partitioned: Partitioned, pattern: tuple[int, ...], feeds: Any, gradients: Any, inner: JointGraph
) -> None:
    """Raise `ArtifactError` unless the feeds and gradients of a derivative exist and fit its graph."""
    signature, own = partitioned.joint.signature, inner.signature
    if len(pattern) != len(signature.gradients.differentiable) or not all(0 <= kind <= 2 for kind in pattern):
        raise ArtifactError("a derivative for other tangents")
    if len(feeds) != len(own.inputs) or len(gradients) != len(signature.inputs):
        raise ArtifactError("a derivative with other inputs or gradients")
    saved, results = len(partitioned.saved_nodes), partitioned.saved_results
    for place in feeds:
        limits = {"input": len(signature.inputs), "saved": saved, "tangent": len(pattern)}
        limit = (limits | {"live": len(signature.backward.live)}).get(place.kind)
        if place.kind == "result":
            if place.index not in results:
                raise ArtifactError("a derivative of a result that is not saved")
        elif limit is None:
            raise ArtifactError(f"a value at {place.kind[:40]!r}")
        else:
            _within([place.index], limit, place.kind)
        if place.kind == "tangent" and not pattern[place.index]:
            raise ArtifactError("a derivative that reads a tangent that is absent")
    for place in gradients:
        if isinstance(place, ValueRef):
            if place.kind not in ("output", "tangent"):
                raise ArtifactError(f"a gradient at {place.kind[:40]!r}")
            count = own.num_forward_outputs if place.kind == "output" else len(pattern)
            _within([place.index], count, place.kind)
