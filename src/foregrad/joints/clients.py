"""The private names by which clients of PyTorch's door reach into its result, as views of `JointWithDescriptors`.

Code of today's projects reads and sets these. New code has `replace`, `inputs` and `tangents`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import fx

from .calls import forward_call
from .held import JointWithDescriptors
from .known import ForwardFacts, InputFacts, OutputFacts, input_facts
from .layout import Layout, inputs_of, is_tensor


class ClientNames:
    """`state` stands for `_aot_state`, `capture` for `_aot_graph_capture`."""

    def __init__(self, jd: JointWithDescriptors) -> None:
        self.state = _State(jd)
        self.capture = _Capture(jd)


class _State:
    def __init__(self, jd: JointWithDescriptors) -> None:
        self._jd, self.fake_mode = jd, jd.fake_mode
        self.needs_autograd = not jd.captured.joint.signature.is_inference
        self.aot_config = SimpleNamespace(
            keep_inference_input_mutations=jd.captured.writes_inside,
            num_params_buffers=len(jd.params_spec) + len(jd.buffers_spec),
            is_export=False,
            dynamic_shapes=jd.fake_mode.shape_env is not None,
            static_input_indices=[*range(len(jd.params_spec) + len(jd.buffers_spec))],
        )
        self.fw_metadata = ForwardMetadata(jd)

    @property
    def flat_args(self) -> list[Any]:
        return self._jd.inputs

    @flat_args.setter
    def flat_args(self, values: Sequence[Any]) -> None:
        _put(self._jd, values)


class _Capture:
    wrappers: tuple[Any, ...] = ()

    def __init__(self, jd: JointWithDescriptors) -> None:
        self._jd = jd

    @property
    def graph_module(self) -> fx.GraphModule:
        return self._jd.graph_module

    @graph_module.setter
    def graph_module(self, module: fx.GraphModule) -> None:
        self._jd.graph_module = module

    @property
    def updated_flat_args(self) -> Any:
        jd = self._jd
        return jd.inputs if jd.captured.joint.signature.is_inference else (jd.inputs, jd.tangents)

    @updated_flat_args.setter
    def updated_flat_args(self, values: Any) -> None:
        primals, tangents = values if isinstance(values, tuple) else (values, ())
        _put(self._jd, [*primals, *tangents])


def _put(jd: JointWithDescriptors, values: Sequence[Any]) -> None:
    for node, value in zip(inputs_of(jd.graph_module.graph), values, strict=False):
        if is_tensor(value):
            node.meta["val"] = value.detach()


class ForwardMetadata(ForwardFacts):
    """The facts that clients read of a forward, and set: positions are those of the graph's inputs and outputs."""

    def __init__(self, jd: JointWithDescriptors) -> None:
        layout: Layout = jd.captured.layout
        signature = jd.captured.joint.signature
        names = [type(entry.desc).__name__ for entry in layout.forward]
        inputs = [
            InputFacts(is_leaf=True, requires_grad=False) if one.input is None else input_facts(signature, one.input)
            for one in layout.primals
        ]
        outputs = [
            OutputFacts(entry.output in signature.gradients.differentiable, base_idx=entry.input)
            for entry, name in zip(layout.forward, names, strict=True)
            if name not in ("InputMutationAOTOutput", "IntermediateBaseAOTOutput")
        ]
        mutated = [number for number, info in enumerate(inputs) if info.mutates_data]
        static = [*range(len(jd.params_spec) + len(jd.buffers_spec))]
        super().__init__(inputs, outputs, mutated, static, jd.tangents)
        self.num_intermediate_bases = names.count("IntermediateBaseAOTOutput")
        if jd.captured.writes_inside:
            self.write_inside(mutated)
        self.jd = jd
        self.traced_tangents_descs = [desc for _, desc in layout.tangents]
        self.subclass_tangent_meta: Sequence[Any] = create_subclass_meta(self.traced_tangents)


def create_subclass_meta(
    curr_args: Sequence[Any], *, count_symints: bool = True, with_memory_format: bool = False
) -> list[Any]:
    """What stands for each tensor in `ForwardMetadata.subclass_tangent_meta`; nothing reads it."""
    return [None for _ in curr_args]


@dataclasses.dataclass
class RuntimeWrapper:
    """Puts around a compiled forward what a call does besides running it: updates of inputs, views of inputs.

    `post_compile(forward, aot_config, runtime_metadata=metadata)` gives a function of the flat arguments that returns
    the flat results. `metadata` is `jd._aot_state.fw_metadata`.
    """

    indices_of_inps_to_detach: Sequence[int] = ()
    trace_joint: bool = False
    disable_amp: bool = False

    def post_compile(
        self, compiled_fn: Callable[..., Any], aot_config: Any = None, *, runtime_metadata: ForwardMetadata
    ) -> Callable[[list[Any]], list[Any]]:
        return forward_call(runtime_metadata.jd, compiled_fn)
