"""The calling convention of a captured function, as data: what goes in, what comes out, how the two are related.

Every consumer (partitioners, the rendered runtime, guards, reports) reads it from here; this is the only module
that knows how slots are laid out in the graphs' argument and output lists.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

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
    SetGradient,
    Write,
)
from .meta import TensorSpec
from .python_effects import PythonWrite
from .slots import Live, Slot, Tangent

__all__ = ["Handle", "OutputInfo"]  # handed on


@dataclasses.dataclass(frozen=True, slots=True)
class BaseOf:
    """Source of an input that is the tensor another input is a view of."""

    input: int


@dataclasses.dataclass(frozen=True, slots=True)
class GradientOf:
    """Source of an input that another input has in `.grad` when the call begins."""

    input: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryOf:
    """Source of an input that is the whole memory another input lives in, as a flat tensor."""

    input: int


@dataclasses.dataclass(frozen=True, slots=True)
class PartOf:
    """Source of an input that is a plain tensor in a wrapper subclass: plain tensor `part` of `wrapper`.

    `wrapper` counts those that the function reached by itself.
    """

    wrapper: int
    part: int
    slot: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class InputInfo:
    """One tensor input of the graphs.

    `argument` is the position among the flattened arguments of the call, or None when the function reached the tensor
    by itself; then `source` says how to read it. `number`: it is an argument of this type
    (int or float), no tensor; an int goes into the graphs as it is, a float as a tensor of no dimension, which is what
    `spec` says.
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
    """A value that decided which way the program went: the graph is right only while `output` gives it again.

    `output` is a graph output: a tensor of one element, or a plain number where `is_tensor` is False. `where` is
    the user's line. `symbol` (sympy): the graph serves every value for which what was found out about it is true.
    """

    output: int
    value: Any
    where: str
    is_tensor: bool = True
    symbol: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class SizeSymbol:
    """A size that may vary from call to call: `symbol` (sympy) stands for dimension `dim` of input `input`.

    `dim` is None where the input is that number, as those of a derivative may be.
    """

    symbol: Any
    input: int
    dim: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ConstantOutput(OutputInfo):
    """Not a tensor: a number, string or None, the same on every call."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class WrapperOutput(OutputInfo):
    """An output that is a wrapper subclass among the inputs, as an object; `wrapper` counts those.

    `view`: it is the view of that input that this is of its stand-in, with these `numbers` where some are symbolic, and
    with gradients on or off; or, where it `is_detached`, that input detached.
    """

    wrapper: int
    view: Any = dataclasses.field(default=None, compare=False)
    numbers: tuple[Any, ...] | None = dataclasses.field(default=None, compare=False)
    grad_enabled: bool = True
    is_detached: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class WrapperPlace:
    """Where a tensor is found once a call's results are made: leaf `number` of the result, wrappers being leaves, or a
    wrapper or plain tensor among the inputs. `of_base`: what that one is a view of is meant.
    """

    kind: Literal["result", "wrapper", "input"]
    number: int
    of_base: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PassedWrapper:
    """A wrapper subclass that others were computed from inside: the positions of these in `differentiable`, and where
    they are found.
    """

    place: WrapperPlace
    after: tuple[int, ...]
    others: tuple[WrapperPlace, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GradientPaths:
    """The outputs (positions in `differentiable`) from which autograd has a path to an input.

    `custom`: those with a path through a custom Function, which gets zeros for what does not come in; PyTorch's own
    formulas leave out what depends on nothing that came in. `is_unclear`: only autograd itself can tell whether some of
    the outputs give a gradient.
    """

    outputs: frozenset[int]
    custom: frozenset[int]
    is_unclear: bool = False

    def leads(self, present: frozenset[int], *, alive: bool) -> bool:
        """Whether eager gives a gradient when what is `present` comes in; `alive`: it depends on some of that."""
        return not present.isdisjoint(self.outputs if alive else self.custom)

    def of_outputs(self, kept: list[int]) -> GradientPaths:
        """The gradient paths of the outputs at these positions alone."""
        number = {old: new for new, old in enumerate(kept)}

        def of(positions: frozenset[int]) -> frozenset[int]:
            return frozenset(number[i] for i in positions if i in number)

        return dataclasses.replace(self, outputs=of(self.outputs), custom=of(self.custom))


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """How the joint graph is called and what its results mean.

    The joint graph takes `primals` (one per entry of `inputs`, in order) then `tangents`, then those of `inputs` that
    are in `in_backward.live` once more; it returns
    `graph_outputs` (one slot each) then the gradients, one per entry of `inputs` (None where there is none), then
    `in_backward.outputs`.

    * `differentiable`: positions in `graph_outputs` that carry gradients; tangent k belongs to `differentiable[k]`.
    * `other_mode`: graph outputs that were made in inference mode, where the graph runs outside it, or the other way
      round. A graph with derivatives never runs in it.
    * `rootless`: graph outputs that require grad and are no leaves, though no gradient goes from them to an input.
    * `gradients`: for each input, whether the joint graph returns a gradient for it.
    * `arrival`: the inputs that gradients go to, in the order in which eager's arrive.
    * `stages`: the inputs whose gradients come together, where the backward gives them out in several stages.
    * `reached_from`: for each input, the differentiable outputs that lead to it; empty when there is but one.
    * `runtime_views`: graph outputs that the graph makes as a view of something; autograd must not know.
    * `decisions`: graph outputs to look at before anything that the call did may be seen.
    * `checks`: operators without results, to be run in their order with the decisions.
    * `in_backward`: what the backward does besides giving gradients.
    * `generators`: what the forward draws from, put back where a call stops, or an operator may raise (a CPU's alone).
    * `made_generators`: random generators that the function makes and draws from, and their states at the beginning.
    * `symbols`: the sizes that the graph is not specialized to; specs and view steps may contain them.
    * `saving`: of the function's autograd nodes in eager that keep tensors: (positions in `differentiable` that lead
      there, inputs that they lead to), as bits.
    * `settings`: what the function sets for what comes after it (grad mode, autocast): names and values.
    * `settings_inside`: those that the graph runs under, where they are others than its call's.
    * `retained`: positions in `outputs` that keep their gradient (`retain_grad()`); `retained_inputs`: inputs that do.
    * `hooks`: (position in `outputs`, hook) that a call puts there; `input_hooks`: (input, hook); `hooked_inside`:
      positions in `outputs` of those with hooks that the backward graph runs.
    * `parameters`: positions in `outputs` of those that are `torch.nn.Parameter`s and no inputs.
    * `attributes`: (position in `outputs`, name, value) of what the function sets on results that are no inputs.
    * `apart`: (inputs that the function takes a gradient by, inputs whose history must not lead to one of these, what
      to say where it does).
    * `passed`: (position in `differentiable`, those of the outputs whose gradients pass through that one on their way).
    * `passed_aliases`: the same for entries of `outputs` that are views (their position there).
    * `log`: what the call does to the inputs and to its results, in order; wrapper subclasses come after all inputs, by
      number.
    * `counted_along`: inputs whose version counter moves along with another one's, none of their elements written.
    * `outputs`: what the user gets back, leaf by leaf, in the order of `output_spec` (a pytree spec), then the leaves
      of the values that are written to Python's state, in the order of `written_spec`.
    * `python_writes`: these writes, in their order.
    * `wrapper_parts`: for each wrapper subclass that inputs are parts of, these.
    * `wrapper_results`: where wrapper subclasses are that are made of graph outputs, and of which.
    * `passed_wrappers`: the same as `passed` for wrapper subclasses, those that come last last.
    * `eager_regions`: the calls of eager regions in the graph, which keeps them by their keys only.
    """

    inputs: tuple[InputInfo, ...]
    graph_outputs: tuple[Slot, ...]
    graph_output_specs: tuple[TensorSpec, ...]
    differentiable: tuple[int, ...]
    tangent_specs: tuple[TensorSpec, ...]
    gradients: tuple[bool, ...]
    runtime_views: frozenset[int]
    outputs: tuple[OutputInfo, ...]
    output_spec: Any
    log: tuple[Effect, ...] = ()
    counted_along: tuple[int, ...] = ()
    rootless: tuple[int, ...] = ()
    other_mode: tuple[int, ...] = ()
    reached_from: tuple[GradientPaths, ...] = ()
    arrival: tuple[int, ...] = ()
    stages: tuple[tuple[int, ...], ...] = ()
    shared_memory: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (input that is the memory, the inputs in it)
    decisions: tuple[DecisionInfo, ...] = ()
    generators: tuple[Any, ...] = ()
    made_generators: tuple[tuple[Any, Any], ...] = ()
    symbols: tuple[SizeSymbol, ...] = ()
    saving: tuple[tuple[int, int], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    settings_inside: tuple[tuple[str, Any], ...] = ()
    retained: tuple[int, ...] = ()
    retained_inputs: tuple[int, ...] = ()
    hooks: tuple[tuple[int, Any], ...] = ()
    input_hooks: tuple[tuple[int, Any], ...] = ()
    hooked_inside: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    attributes: tuple[tuple[int, str, Any], ...] = ()
    apart: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...] = ()
    passed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    passed_aliases: tuple[tuple[int, tuple[int, ...]], ...] = ()
    checks: tuple[CheckInfo, ...] = ()
    in_backward: BackwardEffects = dataclasses.field(default_factory=BackwardEffects)
    python_writes: tuple[PythonWrite, ...] = ()
    eager_regions: tuple[Any, ...] = ()
    written_spec: Any = None
    wrapper_parts: tuple[tuple[int, ...], ...] = ()
    wrapper_results: tuple[tuple[WrapperPlace, frozenset[int]], ...] = ()
    passed_wrappers: tuple[PassedWrapper, ...] = ()

    @property
    def updates(self) -> tuple[Write, ...]:
        """The inputs whose elements are written, but for writes in memory that they are given."""
        writes = (effect for effect in self.log if isinstance(effect, Write))
        return tuple(write for write in writes if write.is_whole and not write.swapped)

    @property
    def gradients_left(self) -> frozenset[int]:
        """Inputs whose `.grad` is set."""
        return frozenset(effect.input for effect in self.log if isinstance(effect, SetGradient))

    @property
    def swapped(self) -> frozenset[int]:
        """Inputs that take another tensor's memory over."""
        return self._inputs_of(SetData)

    @property
    def reshaped(self) -> frozenset[int]:
        """Inputs whose sizes change."""
        return self._inputs_of(InplaceView)

    @property
    def counted(self) -> frozenset[int]:
        """Inputs whose version counter moves though no element is written."""
        return self._inputs_of(BumpVersion)

    @property
    def detached(self) -> frozenset[int]:
        return self._inputs_of(Detach)

    @property
    def marked(self) -> frozenset[int]:
        """Inputs that `requires_grad_()` is called on."""
        return self._inputs_of(MarkRequiresGrad)

    def _inputs_of(self, kind: type[Effect]) -> frozenset[int]:
        return frozenset(effect.input for effect in self.log if isinstance(effect, kind) and effect.is_whole)

    @property
    def parts_marked(self) -> frozenset[int]:
        """Inputs that are parts of wrappers that `requires_grad_()` is called on."""
        wrappers = [number - len(self.inputs) for number in self.marked if number >= len(self.inputs)]
        return frozenset(part for wrapper in wrappers for part in self.wrapper_parts[wrapper])

    @property
    def has_wrappers(self) -> bool:
        """Whether wrapper subclasses are taken apart, or made, around the graph."""
        return bool(self.wrapper_parts or self.in_backward.wrapped) or self.returns_wrappers

    @property
    def returns_wrappers(self) -> bool:
        """Whether some are made of what the graph gives."""
        return any(True for _ in self.output_spec.wrappers())

    @property
    def may_stop(self) -> bool:
        """Whether a call may end once the graph has run, by a decision or a check, with nothing of it to be seen."""
        return bool(self.decisions or self.checks)

    @property
    def num_forward_outputs(self) -> int:
        return len(self.graph_outputs)

    @property
    def is_inference(self) -> bool:
        """Whether there is nothing to differentiate."""
        return not self.differentiable

    def tangent_slots(self) -> list[Slot]:
        """What the backward is given besides what the forward saves: tangents, and inputs as they are by then."""
        live = [Live(self.inputs[i].slot) for i in self.in_backward.live]
        return [*(Tangent(self.graph_outputs[i]) for i in self.differentiable), *live]
