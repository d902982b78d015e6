"""`Partitioned`: the forward and the backward as two graphs, and the residuals between them."""

from __future__ import annotations

import dataclasses

from torch import fx

from .._torch.modules import ends_of
from ..errors import PartitionError
from .joint import JointGraph
from .meta import TensorSpec, nbytes_of, spec_of
from .printing import print_graph, shortened
from .slots import Saved


@dataclasses.dataclass(frozen=True, slots=True)
class Partitioned:
    """A split joint graph.

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
        """The forward nodes whose values are kept, as the forward returns them."""
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
            for position, i in enumerate(signature.differentiable)
            if outputs[i] in number and outputs[i].op != "placeholder" and i not in signature.runtime_views
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
        if len(gives) != len(signature.inputs) + len(signature.in_backward.outputs):
            raise PartitionError(f"the backward returns {len(gives)} gradients for {len(signature.inputs)} inputs")
        names = [n.name for n in takes[: len(self.saved_nodes)]]
        saved = [n.name for n in (*self.saved_sizes, *self.saved_tensors)]
        if names != saved:
            raise PartitionError(f"the backward expects {names}, the forward saves {saved}")

    def __str__(self) -> str:
        slots, halves = self.joint.slot_texts(), {"forward": self.forward, "backward": self.backward}
        return "\n\n".join(
            print_graph(shortened(half), header=f"{title} of {self.joint.name}", slots=slots, name=title)
            for title, half in halves.items()
        )
