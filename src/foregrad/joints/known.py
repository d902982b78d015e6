"""A compiler's view of a graph's function: `TracingContext.fw_metadata`, with AOTAutograd's names."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import torch

from ..dispatch.pipeline import static_inputs
from ..graph.joint import JointGraph
from ..graph.role import GraphRole
from ..graph.signature import Handle, Signature
from ..graph.slots import Updated


class _AsInPyTorch(enum.Enum):
    """Members equal the members of PyTorch's enumeration of equal name, since clients compare both."""

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == type(self).__name__ and getattr(other, "name", None) == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class MutationType(_AsInPyTorch):
    """Who writes to an input."""

    NOT_MUTATED = 1
    MUTATED_IN_GRAPH = 2
    MUTATED_OUT_GRAPH = 3


class OutputType(_AsInPyTorch):
    """The owner of a result's memory."""

    non_alias = 1
    alias_of_intermediate = 5


@dataclasses.dataclass(frozen=True, slots=True)
class InputFacts:
    """An input of the forward. `mutates_data`: the call writes its elements; `mutates_metadata`: it changes sizes."""

    is_leaf: bool
    requires_grad: bool
    mutates_data: bool = False
    mutates_metadata: bool = False
    mutates_storage_metadata: bool = False
    mutations_hidden_from_autograd: bool = True
    mutations_under_no_grad_or_inference_mode: bool = False
    mutation_inductor_storage_resize: bool = False
    keep_input_mutations: bool = False

    @property
    def mutation_type(self) -> MutationType:
        """Whether the graph writes to the input, the caller does, or nobody."""
        if not (self.mutates_data or self.mutates_metadata):
            return MutationType.NOT_MUTATED
        return MutationType.MUTATED_IN_GRAPH if self.keep_input_mutations else MutationType.MUTATED_OUT_GRAPH


@dataclasses.dataclass(frozen=True, slots=True)
class OutputFacts:
    """A result that the forward returns beside new values of inputs. Views of inputs are no results of the graph: they
    are taken after it has run. `is_viewed`: the caller gets only views.
    """

    requires_grad: bool
    is_viewed: bool = False
    raw_type: type = torch.Tensor
    base_idx: int | None = None
    dynamic_dims: frozenset[int] = frozenset()
    view_meta_sequence: object = None

    @property
    def requires_grad_for_backward(self) -> bool:
        return self.requires_grad

    @property
    def output_type(self) -> OutputType:
        return OutputType.alias_of_intermediate if self.is_viewed else OutputType.non_alias


@dataclasses.dataclass
class ForwardFacts:
    """The forward of a graph, for its compiler: the graph returns the new values of the inputs at
    `mutated_inp_runtime_indices`, then `num_outputs` results, one for each entry of `output_info`.

    `static_input_indices` live on from call to call. `traced_tangents`: a fake for each tangent. `bw_donated_idxs`:
    none, as a compiler that reads it does not tell that it writes there, and a graph may be kept for a second backward;
    `GraphRole.donated` names the inputs that a compiler may overwrite if its function says so.
    """

    input_info: list[InputFacts]
    output_info: list[OutputFacts]
    mutated_inp_runtime_indices: list[int]
    static_input_indices: list[int]
    traced_tangents: list[object]
    bw_donated_idxs: list[int] = dataclasses.field(default_factory=list)
    num_intermediate_bases: int = 0
    num_backward_tokens: int = 0
    keep_input_mutations: bool = False
    is_rng_op_functionalized: bool = False
    deterministic: bool | None = None
    grad_enabled_mutation: bool | None = None
    tokens: dict[object, object] = dataclasses.field(default_factory=dict)
    act_input_indices: list[int] = dataclasses.field(default_factory=list)
    unsafe_view_out_indices: list[int] = dataclasses.field(default_factory=list)

    def write_inside(self, inputs: Sequence[int]) -> None:
        """The graph itself writes to the `inputs`, and returns no new values for these."""
        for number in inputs:
            self.input_info[number] = dataclasses.replace(self.input_info[number], keep_input_mutations=True)
        self.mutated_inp_runtime_indices = [n for n in self.mutated_inp_runtime_indices if n not in inputs]
        self.keep_input_mutations = True

    @property
    def mutated_graph_handled_indices(self) -> list[int]:
        return [number for number, info in enumerate(self.input_info) if info.keep_input_mutations]

    @property
    def aliased_out_indices(self) -> list[int]:
        return [number for number, info in enumerate(self.output_info) if info.is_viewed]

    @property
    def num_mutated_inp_runtime_indices(self) -> int:
        return len(self.mutated_inp_runtime_indices)

    @property
    def num_mutated_graph_handled_indices(self) -> int:
        return len(self.mutated_graph_handled_indices)

    @property
    def num_outputs(self) -> int:
        return len(self.output_info)

    @property
    def num_outputs_aliased(self) -> int:
        return len(self.aliased_out_indices)

    @property
    def num_outputs_non_aliased(self) -> int:
        return self.num_outputs - self.num_outputs_aliased

    @property
    def num_forward_returns(self) -> int:
        return self.num_mutated_inp_runtime_indices + self.num_outputs + self.num_intermediate_bases

    num_forward = num_forward_returns


def forward_facts(joint: JointGraph, role: GraphRole) -> ForwardFacts:
    """The known facts about the forward of `joint`."""
    signature = joint.signature
    slots = signature.graph_outputs.slots
    update_at = {
        update.output: update.input for update in signature.updates if isinstance(slots[update.output], Updated)
    }
    differentiable = set(signature.gradients.differentiable)
    whole = {info.output for info in signature.structure.outputs if isinstance(info, Handle) and not info.steps}
    viewed = {info.output for info in signature.structure.outputs if isinstance(info, Handle) and info.steps} - whole
    results = [i for i in range(len(slots)) if i not in update_at]
    outputs = [OutputFacts(i in differentiable, is_viewed=i in viewed) for i in results]
    returned = [update_at[i] for i in sorted(update_at)]
    inputs = [input_facts(signature, number) for number in range(len(signature.inputs))]
    tangents = [node.meta["val"] for node in joint.placeholders() if node.name.startswith("tangents_")]
    return ForwardFacts(inputs, outputs, returned, static_inputs(signature), tangents)


def input_facts(signature: Signature, number: int) -> InputFacts:
    """The known facts about an input of a joint graph."""
    info = signature.inputs[number]
    writes = [update for update in signature.updates if update.input == number]
    return InputFacts(
        is_leaf=info.is_leaf,
        requires_grad=info.requires_grad,
        mutates_data=bool(writes) or number in signature.swapped,
        mutates_metadata=number in signature.reshaped,
        mutates_storage_metadata=number in signature.swapped,
        mutations_hidden_from_autograd=not any(update.counted for update in writes),
        mutations_under_no_grad_or_inference_mode=bool(writes) and signature.is_inference,
    )
