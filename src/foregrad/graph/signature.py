"""The calling convention of a captured function, as data: inputs, outputs, and the relations of both.

Partitioners, the rendered runtime, guards and reports read it here alone; no other module knows the order of slots in
the graphs' argument and output lists.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from .call_effects import CallEffect, ClearGradient, ObjectWrite, SetGradient, TensorEffect
from .effect_log import (
    BackwardEffects,
    BumpVersion,
    CheckInfo,
    Detach,
    Effect,
    Handle,
    InplaceView,
    MarkRequiresGrad,
    OutputInfo,
    SetData,
    Write,
)
from .meta import TensorSpec
from .slots import Live, Slot, Tangent

__all__ = ["Handle", "OutputInfo"]  # handed on


@dataclasses.dataclass(frozen=True, slots=True)
class BaseOf:
    """Source of an input that is the base of input `input`."""

    input: int


@dataclasses.dataclass(frozen=True, slots=True)
class GradientOf:
    """Source of an input that is the `.grad` of input `input` when the call begins."""

    input: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryOf:
    """Source of an input that is the whole memory of input `input`, as a flat tensor."""

    input: int


@dataclasses.dataclass(frozen=True, slots=True)
class PartOf:
    """Source of an input that is a plain tensor in a wrapper subclass: plain tensor `part` of `wrapper`.

    `wrapper` counts wrappers that the function reached by itself; `of` is the wrapper's own source.
    """

    wrapper: int
    part: int
    slot: Slot
    of: Any = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class InputInfo:
    """One tensor input of the graphs.

    `argument` is the position among the flattened arguments of the call, or None when the function reached the tensor
    by itself; then `source` says how to read it. `number`: the type of an argument that is a number (int or float). An
    int goes into the graphs unchanged, a float as a tensor of no dimension, as `spec` says.
    """

    slot: Slot
    spec: TensorSpec
    requires_grad: bool
    is_leaf: bool
    argument: int | None = None
    source: Any = None
    number: type | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DecisionInfo:
    """A value that the program branched on: the graph is right only while `output` gives the value again.

    `output` is a graph output: a tensor of one element, or a plain number where `is_tensor` is False. `where` is the
    user's line. `symbol` (sympy): the graph serves every value that satisfies the conditions found on the symbol.
    """

    output: int
    value: Any
    where: str
    is_tensor: bool = True
    symbol: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class SizeSymbol:
    """A size that may vary from call to call: `symbol` (sympy) stands for dimension `dim` of input `input`.

    `dim` is None where the input is the number itself, as in a derivative.
    """

    symbol: Any
    input: int
    dim: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ConstantOutput(OutputInfo):
    """Not a tensor: a number, string or None, equal in every call."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class WrapperOutput(OutputInfo):
    """An output that is a wrapper subclass among the inputs, as an object; `wrapper` is its number."""

    wrapper: int


@dataclasses.dataclass(frozen=True, slots=True)
class WrapperPlace:
    """Where a tensor is found once a call's results are made: leaf `number` of the result, wrappers being leaves, or a
    wrapper or plain tensor among the inputs.
    """

    kind: Literal["result", "wrapper", "input"]
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class PassedWrapper:
    """A wrapper subclass that further results were computed from inside: the positions of its parts in
    `differentiable`, and their places.
    """

    place: WrapperPlace
    after: tuple[int, ...]
    others: tuple[WrapperPlace, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GradientPaths:
    """The outputs (positions in `differentiable`) with a path in autograd to an input.

    `custom`: outputs with a path through a custom Function, since a Function gets zeros for an absent cotangent;
    PyTorch's own formulas leave out gradients without any cotangent. `is_unclear`: only autograd itself can tell
    whether the outputs give a gradient.
    """

    outputs: frozenset[int]
    custom: frozenset[int]
    is_unclear: bool = False

    def leads(self, present: frozenset[int], *, alive: bool) -> bool:
        """Whether eager gives a gradient when the cotangents `present` come in; `alive`: the gradient depends on some
        of the cotangents.
        """
        return not present.isdisjoint(self.outputs if alive else self.custom)

    def of_outputs(self, kept: list[int]) -> GradientPaths:
        """The gradient paths of the outputs at these positions alone."""
        number = {old: new for new, old in enumerate(kept)}

        def of(positions: frozenset[int]) -> frozenset[int]:
            return frozenset(number[i] for i in positions if i in number)

        return dataclasses.replace(self, outputs=of(self.outputs), custom=of(self.custom))


@dataclasses.dataclass(frozen=True, slots=True)
class GraphOutputs:
    """The outputs of the forward, in order: their slots and `specs`.

    * `runtime_views`: outputs that the graph makes as views of other values; autograd must not know.
    """

    slots: tuple[Slot, ...]
    specs: tuple[TensorSpec, ...]
    runtime_views: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class GradientInfo:
    """The flow of gradients: outputs that carry gradients, inputs that receive gradients, observers in between.

    * `differentiable`: graph outputs that carry gradients; tangent k, of `tangent_specs[k]`, belongs to
      `differentiable[k]`. Positions in `differentiable` are called differentiable outputs.
    * `returned`: for each input, whether the joint graph returns a gradient for it.
    * `rootless`: graph outputs that require grad and are no leaves, though no gradient goes from them to an input.
    * `reached_from`: for each input, the differentiable outputs that lead to it; empty when there is but one.
    * `arrival`: the inputs that gradients go to, in the order in which eager's arrive.
    * `stages`: the inputs of each stage of a backward that gives out gradients in several stages.
    * `saving`: for each of eager's autograd nodes that keep tensors: (differentiable outputs that lead to the node,
      inputs that the node leads to), as bits.
    * `passed`: (differentiable output, the differentiable outputs with gradients that pass through it).
    * `passed_aliases`: likewise for leaves of the result that are views (their positions).
    * `passed_wrappers`: `passed` for wrapper subclasses, in program order.
    * `wrapper_results`: places of wrapper subclasses made of graph outputs, with the outputs.
    * `hooked_inside`: leaves of the result with hooks that the backward graph runs.
    """

    differentiable: tuple[int, ...]
    tangent_specs: tuple[TensorSpec, ...]
    returned: tuple[bool, ...]
    rootless: tuple[int, ...] = ()
    reached_from: tuple[GradientPaths, ...] = ()
    arrival: tuple[int, ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()
    saving: tuple[tuple[int, int], ...] = ()
    passed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    passed_aliases: tuple[tuple[int, tuple[int, ...]], ...] = ()
    passed_wrappers: tuple[PassedWrapper, ...] = ()
    wrapper_results: tuple[tuple[WrapperPlace, frozenset[int]], ...] = ()
    hooked_inside: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StructureInfo:
    """The structure of arguments and results around the tensors of the graph.

    * `outputs`: the leaves of the user's result, in the order of `output_spec` (a pytree spec), then the leaves of the
      values that are written to Python's state, in the order of `written_spec`.
    * `shared_memory`: (input that is the memory, the inputs in it).
    * `wrapper_parts`: for each wrapper subclass among arguments and closed-over tensors, the inputs that are its parts.
    """

    outputs: tuple[OutputInfo, ...] = ()
    output_spec: Any = None
    written_spec: Any = None
    shared_memory: tuple[tuple[int, tuple[int, ...]], ...] = ()
    wrapper_parts: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EffectInfo:
    """The effects of a call.

    * `log`: effects on inputs and results, in order; wrapper subclasses come after all inputs, by number.
    * `around`: effects around the graph.
    * `python_writes`: writes to Python's state, in their order.
    * `counted_along`: inputs without a written element that share the version counter of a written input.
    """

    log: tuple[Effect, ...] = ()
    around: tuple[CallEffect, ...] = ()
    python_writes: tuple[ObjectWrite, ...] = ()
    counted_along: tuple[int, ...] = ()

    @property
    def numbers_there(self) -> set[tuple[str, str]]:
        """The numbers, as text, that are at the places of writes outside of calls, each with its path."""
        return {(write.path, repr(write.place.get())) for write in self.python_writes if write.counts and write.place}


@dataclasses.dataclass(frozen=True, slots=True)
class StopInfo:
    """The tests by which a call ends early, since the graph is wrong for its values.

    * `decisions`: graph outputs to compare before any effect of the call is visible.
    * `checks`: operators without results, to be run in their order with the decisions.
    * `generators`: the generators that the forward draws from, restored when a call ends early, or an operator raises
      (a CPU's alone).
    * `eager_regions`: the calls of eager regions in the graph; the graph itself has only their keys.
    """

    decisions: tuple[DecisionInfo, ...] = ()
    checks: tuple[CheckInfo, ...] = ()
    generators: tuple[Any, ...] = ()
    eager_regions: tuple[Any, ...] = ()

    @property
    def in_python(self) -> str:
        """The functions that the interpreter runs in each call, with their lines."""
        return "; ".join(f"`{region.name}` at {region.where}" for region in self.eager_regions)


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The convention for calling the joint graph, and the meanings of its results.

    The joint graph takes `primals` (one per entry of `inputs`, in order) then `tangents`, then the `inputs` in
    `backward.live` once more; it returns `graph_outputs` then the gradients, one per entry of `inputs` (None where
    there is none), then `backward.outputs`.

    * `backward`: the backward's effects.
    * `symbols`: the sizes that the graph is not specialized to; specs and view steps may contain them.
    """

    inputs: tuple[InputInfo, ...]
    graph_outputs: GraphOutputs
    gradients: GradientInfo
    structure: StructureInfo = dataclasses.field(default_factory=StructureInfo)
    effects: EffectInfo = dataclasses.field(default_factory=EffectInfo)
    stops: StopInfo = dataclasses.field(default_factory=StopInfo)
    backward: BackwardEffects = dataclasses.field(default_factory=BackwardEffects)
    symbols: tuple[SizeSymbol, ...] = ()

    @property
    def updates(self) -> tuple[Write, ...]:
        """The inputs with written elements, but for writes to memory assigned in the call."""
        writes = (effect for effect in self.effects.log if isinstance(effect, Write))
        return tuple(write for write in writes if write.is_whole and not write.swapped)

    @property
    def gradients_left(self) -> frozenset[int]:
        """Inputs that get a `.grad`."""
        return frozenset(e.target.number for e in self.effects.around if isinstance(e, (ClearGradient, SetGradient)))

    @property
    def changed_inputs(self) -> list[int]:
        """Inputs that a call changes: elements, sizes, `.grad`, hooks. Wrapper subclasses are not among them."""
        numbers = [effect.input for effect in self.effects.log]
        targets = [effect.target for effect in self.effects.around if isinstance(effect, TensorEffect)]
        numbers += [target.number for target in targets if target.is_input]
        return [number for number in dict.fromkeys(numbers) if 0 <= number < len(self.inputs)]

    @property
    def swapped(self) -> frozenset[int]:
        """Inputs that take over a tensor's memory."""
        return self._inputs_of(SetData)

    @property
    def reshaped(self) -> frozenset[int]:
        """Inputs that change sizes."""
        return self._inputs_of(InplaceView)

    @property
    def counted(self) -> frozenset[int]:
        """Inputs without written elements that still count a version."""
        return self._inputs_of(BumpVersion)

    @property
    def detached(self) -> frozenset[int]:
        return self._inputs_of(Detach)

    @property
    def marked(self) -> frozenset[int]:
        """Inputs that `requires_grad_()` is called on."""
        return self._inputs_of(MarkRequiresGrad)

    def name_of(self, effect: CallEffect) -> str:
        """The affected tensor's name for people; empty without a tensor or a name."""
        if not isinstance(effect, TensorEffect):
            return ""
        target = effect.target
        if not target.is_input:
            return self.structure.outputs[target.number].path
        return str(self.inputs[target.number].slot) if target.number < len(self.inputs) else ""

    def words_of(self, effect: CallEffect) -> str:
        """An effect in words, with the name of its tensor."""
        if not isinstance(effect, TensorEffect):
            return str(effect)
        return str(effect).replace(str(effect.target), self.name_of(effect), 1)

    def _inputs_of(self, kind: type[Effect]) -> frozenset[int]:
        return frozenset(effect.input for effect in self.effects.log if isinstance(effect, kind) and effect.is_whole)

    @property
    def has_wrappers(self) -> bool:
        """Whether wrapper subclasses are taken apart, or made, around the graph."""
        return bool(self.structure.wrapper_parts or self.backward.wrapped) or self.returns_wrappers

    @property
    def returns_wrappers(self) -> bool:
        """Whether wrapper subclasses are made of graph outputs."""
        return any(True for _ in self.structure.output_spec.wrappers())

    @property
    def may_stop(self) -> bool:
        """Whether a call may end once the graph has run, by a decision or a check, with no visible effect."""
        return bool(self.stops.decisions or self.stops.checks)

    @property
    def num_forward_outputs(self) -> int:
        return len(self.graph_outputs.slots)

    @property
    def is_inference(self) -> bool:
        """Whether there is nothing to differentiate."""
        return not self.gradients.differentiable

    def tangent_slots(self) -> list[Slot]:
        """The backward's inputs besides residuals: tangents, and inputs in their state at the backward."""
        live = [Live(self.inputs[i].slot) for i in self.backward.live]
        return [*(Tangent(self.graph_outputs.slots[i]) for i in self.gradients.differentiable), *live]
