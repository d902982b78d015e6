"""`JointGraph`: forward and backward of a function as one functional graph; `Partitioned`: as two graphs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

from .._torch.graphs import ends_of
from ..errors import GraphError, PartitionError
from .effect_log import Handle
from .meta import TensorSpec, nbytes_of, spec_of
from .printing import print_graph
from .role import outlined
from .signature import Signature
from .slots import Checked, Saved


@dataclasses.dataclass(frozen=True, slots=True)
class JointGraph:
    """One captured function: `(primals..., tangents...) -> [forward outputs..., gradients..., effects...]`.

    `module` holds the fx graph; placeholders are called `primals_N` and `tangents_N`. `backward_error`: the error of
    eager's backward, if the forward runs but can't be differentiated. `failing`: such errors for some outputs only, by
    their position among the differentiable outputs. `raising`: errors on paths that end at no input (a leaf made
    inside the function, say), by graph output. `str()` gives Python source.

    Examples:
        >>> import torch, foregrad
        >>> joint = foregrad.capture(lambda x: x.sin(), torch.ones(2, requires_grad=True))
        >>> [str(info.slot) for info in joint.signature.inputs]
        ['args[0]']
    """

    name: str
    module: fx.GraphModule
    signature: Signature
    fake_mode: Any
    backward_error: Exception | None = None
    symbols: Any = None  # the SymbolTable behind symbolic sizes, when there are any
    failing: Mapping[int, Exception] = dataclasses.field(default_factory=dict)
    raising: Mapping[int, Exception] = dataclasses.field(default_factory=dict)

    @property
    def error(self) -> Exception | None:
        """The error of the backward or of a part; None if there is none."""
        return self.backward_error or next(
            (self.raising[i] for i in self.signature.gradients.rootless if i in self.raising), None
        )

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def outputs(self) -> list[Any]:
        """The output list: forward outputs, then one gradient (or None) per input, then the backward's effects."""
        return list(next(iter(reversed(self.graph.nodes))).args[0])

    def inputs_taken(self) -> list[int]:
        """The inputs that are inputs of the autograd node, in the order of its edges. As in eager, no others."""
        later = {i for stage in self.signature.gradients.stages[1:] for i in stage}
        leaves = {i for i, info in enumerate(self.signature.inputs) if info.is_leaf and i not in later}
        return queued_to_arrive(self._taken(), self.signature.gradients.arrival, leaves)

    def _taken(self) -> list[int]:
        signature = self.signature
        inputs = enumerate(signature.inputs)
        differentiable = [i for i, info in inputs if info.requires_grad or i in signature.marked]
        if self.backward_error is not None or self.failing:
            # The paths of the gradients are unknown, except for inputs that nothing leads to.
            reached = signature.gradients.reached_from
            return [i for i in differentiable if not reached or reached[i].outputs] or differentiable
        wrapped = {gradient.input for gradient in signature.backward.wrapped}
        return [i for i in differentiable if signature.gradients.returned[i] or i in wrapped] or differentiable

    def slot_texts(self) -> dict[str, str]:
        """For printing: the slot of each placeholder, and the decided values."""
        slots = [*(info.slot for info in self.signature.inputs), *self.signature.tangent_slots()]
        texts = {node.name: str(slot) for node, slot in zip(self.placeholders(), slots, strict=True)}
        for decision in self.signature.stops.decisions:
            texts[f"output[{decision.output}]"] = str(self.signature.graph_outputs.slots[decision.output])
        for at, slot in enumerate(self.signature.graph_outputs.slots):
            if isinstance(slot, Checked):
                texts[f"output[{at}]"] = str(slot)
        return texts

    def example_inputs(self) -> tuple[list[Any], list[Any]]:
        """(primals, tangents) as fake tensors, the arguments of partitioners."""
        values = [node.meta["val"] for node in self.placeholders()]
        split = len(self.signature.inputs)
        return values[:split], values[split:]

    def check(self) -> None:
        """Raise `GraphError` unless:

        * every operator is functional: its schema writes to no argument;
        * every name is used after it is made;
        * there is one placeholder per input and per tangent, one output per slot and per input's gradient;
        * placeholders and forward outputs have the shape, strides and dtype that the signature gives.
        """
        signature = self.signature
        for node in self.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if node.op == "call_function" and schema is not None and schema.is_mutable:
                raise GraphError(f"{node.name} = {node.target} writes to its arguments:\n{self._around(node)}")
        self.graph.lint()
        live = [signature.inputs[i].spec for i in signature.backward.live]
        expected = [*(info.spec for info in signature.inputs), *signature.gradients.tangent_specs, *live]
        placeholders = self.placeholders()
        if len(placeholders) != len(expected):
            raise GraphError(f"{len(placeholders)} placeholders for {len(expected)} inputs and tangents")
        outputs = self.outputs()
        effects = len(signature.backward.outputs)
        if len(outputs) != signature.num_forward_outputs + len(signature.inputs) + effects:
            raise GraphError(
                f"{len(outputs)} outputs for {signature.num_forward_outputs} slots, {len(signature.inputs)} gradients "
                f"and {effects} effects of the backward"
            )
        pairs = [*zip(placeholders, expected, strict=True), *zip(outputs, signature.graph_outputs.specs, strict=False)]
        for node, spec in pairs:
            have = spec_of(node)
            if isinstance(have, TensorSpec) and not have.same_layout(spec):
                raise GraphError(
                    f"{node.name} is {have} with strides {have.stride}, its slot says {spec}, {spec.stride}:"
                    f"\n{self._around(node)}"
                )

    def _around(self, node: fx.Node, count: int = 5) -> str:
        nodes = list(self.graph.nodes)
        at = nodes.index(node)
        return "\n".join(
            f"{'->' if n is node else '  '} {n.format_node()}" for n in nodes[max(0, at - count) : at + count]
        )

    def __str__(self) -> str:
        from .printing import print_graph

        header = f"joint graph of {self.name}, after capture"
        for result in self.signature.structure.outputs:
            if isinstance(result, Handle) and result.input is not None:  # no output of the graph: a reader looks for it
                view = "a view of " if result.steps else ""
                header += f"\n{result.path} is {view}{self.signature.inputs[result.input].slot}"
        return print_graph(outlined(self.module, to_read=True), header=header, slots=self.slot_texts())

    def num_guards(self) -> int:
        """The number of conditions on symbolic sizes so far; the graph depends on all."""
        return len(self.symbols.guards()) if self.symbols is not None else 0


# -------------------------------------------------------------------- arrival
# The order in which a compiled function's gradients arrive at leaves: it is eager's.
#
# Hooks see this order, and so does an optimizer in the backward; `DistributedDataParallel` lays out its buckets by this
# order. One node gives all gradients at once. The engine then has one task for each leaf in its queue, a binary heap in
# which leaves are equal and come before all other nodes. The heap's order depends only on the order of arrival in the
# heap.


def queued_to_arrive(taken: Sequence[int], arrival: Sequence[int], leaves: Collection[int]) -> list[int]:
    """The inputs `taken`, in the queueing order that lets gradients of `leaves` arrive in the order `arrival`.

    Other inputs follow: they wait until no leaf is left.
    """
    among, noted = set(taken), set(arrival)
    in_order = [i for i in arrival if i in leaves and i in among]
    in_order += [i for i in taken if i in leaves and i not in noted]
    others = [i for i in taken if i not in leaves]
    queued = [0] * len(in_order)
    for place, index in zip(_taken_out(len(in_order), len(others)), in_order, strict=True):
        queued[place] = index
    return [*queued, *others]


@functools.cache
def _taken_out(count: int, others: int) -> tuple[int, ...]:
    """The numbers 0 to `count` - 1 in the order of a heap that got equal items by number and `others` smaller items
    after: `std::priority_queue` of libstdc++.
    """
    heap = list(range(count + others))
    order: list[int] = []
    while len(order) < count:
        order.append(heap[0])
        item = heap.pop()
        if heap:
            _sink(heap, item, count)
    return tuple(order)


def _sink(heap: list[int], item: int, count: int) -> None:
    """Put an item in place of the greatest: the gap sinks to a leaf, then the item rises."""
    at, child = 0, 2
    while child < len(heap):
        if heap[child] >= count > heap[child - 1]:
            child -= 1
        heap[at], at = heap[child], child
        child = 2 * at + 2
    if child == len(heap):
        heap[at], at = heap[child - 1], child - 1
    while at and heap[(at - 1) // 2] >= count > item:
        heap[at], at = heap[(at - 1) // 2], (at - 1) // 2
    heap[at] = item


# ---------------------------------------------------------------------------------------------------------- its halves


@dataclasses.dataclass(frozen=True, slots=True)
class Partitioned:
    """A split joint graph, with the residuals between its halves.

    `forward`: primals -> [forward outputs, saved tensors, saved symbolic sizes].
    `backward`: (saved symbolic sizes, saved tensors, tangents) -> gradients, then effects.

    Examples:
        >>> import torch, foregrad
        >>> joint = foregrad.capture(lambda x: x.sin(), torch.ones(2, requires_grad=True))
        >>> parts = foregrad.partition(joint)
        >>> [node.name for node in parts.saved_nodes]
        ['primals_1']
    """

    joint: JointGraph
    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def saved_nodes(self) -> list[fx.Node]:
        """The forward nodes with kept values, in the forward's order."""
        return [*ends_of(self.forward)[1]][self.joint.signature.num_forward_outputs :]

    @property
    def saved(self) -> list[Saved]:
        return [Saved(node.name) for node in self.saved_nodes]

    @property
    def saved_results(self) -> dict[int, int]:
        """Differentiable outputs that are residuals too: their positions among the saved values, by output."""
        signature = self.joint.signature
        outputs, number = [*ends_of(self.forward)[1]], {node: i for i, node in enumerate(self.saved_nodes)}
        return {
            position: number[outputs[i]]
            for position, i in enumerate(signature.gradients.differentiable)
            if outputs[i] in number
            and outputs[i].op != "placeholder"
            and i not in signature.graph_outputs.runtime_views
        }

    @property
    def saved_tensors(self) -> list[fx.Node]:
        return [node for node in self.saved_nodes if isinstance(spec_of(node), TensorSpec)]

    @property
    def saved_sizes(self) -> list[fx.Node]:
        return [node for node in self.saved_nodes if not isinstance(spec_of(node), TensorSpec)]

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward beyond the inputs themselves."""
        return sum(nbytes_of(node) for node in self.saved_nodes if node.op != "placeholder")

    def check(self) -> None:
        """Raise `PartitionError` unless the two halves fit each other and the joint graph's signature.

        If eager's backward raises, there is no backward half: the runtime raises that error in its place.
        """
        signature = self.joint.signature
        primals = ends_of(self.forward)[0]
        if len(primals) != len(signature.inputs):
            raise PartitionError(f"the forward takes {len(primals)} inputs, the function has {len(signature.inputs)}")
        if self.joint.backward_error is not None:
            return
        expected = len(self.saved_nodes) + len(signature.tangent_slots())
        takes, gives = ends_of(self.backward)
        if len(takes) != expected:
            raise PartitionError(f"the backward takes {len(takes)} inputs; {expected} saved values and tangents exist")
        if len(gives) != len(signature.inputs) + len(signature.backward.outputs):
            raise PartitionError(f"the backward returns {len(gives)} gradients for {len(signature.inputs)} inputs")
        names = [n.name for n in takes[: len(self.saved_nodes)]]
        saved = [n.name for n in (*self.saved_sizes, *self.saved_tensors)]
        if names != saved:
            raise PartitionError(f"the backward expects {names}, the forward saves {saved}")

    def __str__(self) -> str:
        slots, halves = self.joint.slot_texts(), {"forward": self.forward, "backward": self.backward}
        return "\n\n".join(
            print_graph(outlined(half, to_read=True), header=f"{title} of {self.joint.name}", slots=slots, name=title)
            for title, half in halves.items()
        )
