"""`JointWithDescriptors`: a joint graph to be edited and compiled, with what its inputs and outputs are."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..descriptors import flat_outputs
from ..graph.joint import JointGraph
from .layout import Layout, inputs_of, is_tensor


@dataclasses.dataclass(frozen=True)
class HeldCapture:
    """The captured function and its state at the capture: fixed, however the graph is edited."""

    joint: JointGraph
    layout: Layout
    writes_inside: bool
    grad_enabled: bool
    autocast: bool
    again: Callable[..., Any]  # the module's call, for messages


class JointWithDescriptors:
    """A joint graph of a module. Edit `graph_module`, or replace it, and pass this to
    `foregrad.aot_compile_joint_with_descriptors`.

    `params_spec`, `buffers_spec`: the names of parameters and buffers in the order in which the graph and the compiled
    function take them, a tied one under each of its names. `in_spec`, `out_spec`: PyTorch's `TreeSpec` of the
    arguments, `([*params, *buffers, *args], kwargs)`, and of the result. `fake_mode`: the mode of the graph's fakes.

    Examples:
        >>> import contextlib, torch, foregrad
        >>> with contextlib.ExitStack() as stack:
        ...     jd = foregrad.aot_export_joint_with_descriptors(stack, torch.nn.Linear(3, 2), (torch.ones(1, 3),))
        >>> jd.params_spec, jd.buffers_spec
        (['weight', 'bias'], [])
        >>> [node.meta["desc"].expr() for node in jd.graph_module.graph.find_nodes(op="placeholder")][-1]
        '__output_tangent(output[0])'
    """

    def __init__(self, graph_module: fx.GraphModule, captured: HeldCapture) -> None:
        self.graph_module = graph_module
        self.captured = captured
        layout = captured.layout
        self.params_spec = list(layout.names[: layout.num_parameters])
        self.buffers_spec = list(layout.names[layout.num_parameters :])
        self.in_spec, self.out_spec = layout.in_spec, layout.out_spec
        self.serialized_with: Any = None
        self._of_clients: Any = None

    @property
    def fake_mode(self) -> Any:
        return self.captured.joint.fake_mode

    @property
    def inputs(self) -> list[Any]:
        """The values that stand for parameters, buffers and arguments in the graph, fakes for tensors."""
        return self._values()[: len(self.captured.layout.primals)]

    @property
    def tangents(self) -> list[Any]:
        """The fakes that stand for the tangents."""
        return self._values()[len(self.captured.layout.primals) :]

    def _values(self) -> list[Any]:
        return [node.meta["val"] for node in inputs_of(self.graph_module.graph)]

    def replace(
        self,
        graph_module: fx.GraphModule,
        *,
        inputs: Sequence[Any] | None = None,
        tangents: Sequence[Any] | None = None,
    ) -> JointWithDescriptors:
        """A copy with a graph that may take tensors of different shapes, a shard of each parameter for example.

        The graph has as many inputs and outputs as before, in their order. `inputs` and `tangents`: the values that
        stand for them, fakes for tensors; by default those in `meta["val"]` of the graph's placeholders.

        Raises `ValueError` where the number of inputs, tangents or outputs differs.
        """
        self.check(graph_module)
        placeholders = inputs_of(graph_module.graph)
        count = len(self.captured.layout.primals)
        for what, nodes, values in (
            ("inputs", placeholders[:count], inputs),
            ("tangents", placeholders[count:], tangents),
        ):
            if values is None:
                continue
            if len(values) != len(nodes):
                raise ValueError(f"the graph takes {len(nodes)} {what}, {len(values)} were given")
            for node, value in zip(nodes, values, strict=True):
                node.meta["val"] = value.detach() if is_tensor(value) else value
        made = JointWithDescriptors(graph_module, self.captured)
        made.serialized_with = self.serialized_with
        return made

    def check(self, graph_module: fx.GraphModule) -> None:
        """Raise `ValueError` unless a graph has as many inputs and outputs as this one was made with."""
        layout = self.captured.layout
        inference = self.captured.joint.signature.is_inference
        outputs = len(layout.forward) + (0 if inference else len(layout.primals))
        inputs = len(layout.primals) + len(layout.tangents)
        takes = len(inputs_of(graph_module.graph))
        gives = len(flat_outputs(next(iter(reversed(graph_module.graph.nodes)))))
        if (takes, gives) != (inputs, outputs):
            raise ValueError(
                f"the joint graph takes {inputs} inputs and gives {outputs} outputs, this graph {takes} and {gives}. "
                "Keep inputs that nothing reads, and None for outputs that there are no more."
            )

    def cache_hash(self) -> str:
        """A key that is the same for equal graphs with equal inputs: SHA-256, in hexadecimal digits.

        Shapes, strides, dtypes and devices of inputs, names and descriptors count.
        """
        text = [repr((self.params_spec, self.buffers_spec, str(self.in_spec), str(self.out_spec)))]
        for node in self.graph_module.graph.nodes:
            text.append(node.format_node() or repr(node.args))
            if node.op in ("placeholder", "output"):
                text.append(repr(node.meta.get("desc")))
            value = node.meta.get("val") if node.op == "placeholder" else None
            if isinstance(value, torch.Tensor):
                text.append(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def __repr__(self) -> str:
        layout = self.captured.layout
        return (
            f"JointWithDescriptors({self.captured.joint.name}: {len(self.params_spec)} parameters, "
            f"{len(self.buffers_spec)} buffers, {len(layout.forward)} outputs of the forward)"
        )

    # ---------------------------------------------------------------- the names that clients use

    @property
    def _aot_state(self) -> Any:
        return self._clients().state

    @property
    def _aot_graph_capture(self) -> Any:
        return self._clients().capture

    def _clients(self) -> Any:
        if self._of_clients is None:
            from .clients import ClientNames  # late: few ask for it

            self._of_clients = ClientNames(self)
        return self._of_clients
