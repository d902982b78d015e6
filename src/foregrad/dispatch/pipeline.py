"""The pipeline on one screen: from a flattened call to compiled halves, stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .._torch import engine
from .._torch.modules import make_graph_module
from ..backends.boxed import as_boxed
from ..backends.eager import eager_compiler
from ..config import Config
from ..errors import BackendError, ForegradError
from ..frontend.call import FlatCall
from ..frontend.sources import Source
from ..graph.joint import JointGraph
from ..graph.partitioned import Partitioned
from ..passes.mutations import with_mutations_inside
from ..passes.zeros import without_tangents
from ..runtime.compiled import Boxed, Compiled
from ..tracing.collection import paused_collection
from .naming import graph_being_compiled

if TYPE_CHECKING:
    from ..tracing.capture import Captured

__all__ = ["Pipeline", "Product"]

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """What the pipeline made of one call."""

    captured: Captured
    compiled: Compiled

    def without_tensors(self) -> Product:
        """The same, holding on to none of the call's tensors."""
        return dataclasses.replace(self, captured=dataclasses.replace(self.captured, tensors=()))


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages' settings: compilers, partitioner, decompositions."""

    fw_compiler: Compiler
    bw_compiler: Compiler
    inference_compiler: Compiler
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    decompositions: Mapping[Any, Callable[..., Any]] | None = None
    lifted: Sequence[Source] = ()  # tensors that become inputs ahead of the arguments, used or not
    keep_inference_input_mutations: bool = False

    def with_lifted(self, lifted: Sequence[Source]) -> Pipeline:
        return dataclasses.replace(self, lifted=lifted)

    def build(self, call: FlatCall, name: str, config: Config) -> Product:
        """Capture, partition, compile."""
        with paused_collection():
            return self._build(call, name, config)

    def _build(self, call: FlatCall, name: str, config: Config) -> Product:
        from ..tracing.capture import capture_call  # late: a third of the time that importing foregrad would take

        # One run on fakes: forward and backward as one functional graph.
        lifted = [(source.get(), source) for source in self.lifted]
        captured = capture_call(call, name=name, decompositions=self.decompositions, lifted=lifted)
        joint = captured.joint
        if config.check:
            joint.check()
        # What runs now, what runs in the backward, and what is kept in between.
        partitioned = self.split(joint)
        if config.check and not joint.signature.is_inference:
            partitioned.check()
        if self.keep_inference_input_mutations and joint.signature.is_inference:
            partitioned = with_mutations_inside(partitioned)
        # Each half to its compiler; the backward only when it is first needed.
        return Product(captured, self.compile(partitioned))

    def split(self, joint: JointGraph) -> Partitioned:
        """The two halves; for a function without gradients the joint graph is the forward."""
        signature = joint.signature
        if signature.is_inference or joint.backward_error is not None:
            return Partitioned(joint, _forward_only(joint), _EMPTY)
        forward, backward = self.partition(
            joint.module, joint.example_inputs(), num_fwd_outputs=signature.num_forward_outputs
        )
        return Partitioned(joint, forward, backward)

    def compile(self, partitioned: Partitioned) -> Compiled:
        """The halves compiled; backward lazily."""
        joint = partitioned.joint
        inference = joint.signature.is_inference
        compiler = self.inference_compiler if inference else self.fw_compiler
        phase = "inference" if inference else "forward"
        forward = _compile(compiler, partitioned.forward, joint.name, phase)
        backward = partitioned.backward
        num_saved = len(partitioned.saved_nodes)

        def make_backward() -> Boxed:
            return _compile_late(self.bw_compiler, backward, joint)

        def make_partial_backward(mask: tuple[bool, ...]) -> Boxed:
            module = without_tangents(backward, num_saved, mask, joint.signature.reached_from)
            return _compile_late(self.bw_compiler, module, joint)

        return Compiled(
            partitioned,
            forward,
            make_backward,
            make_partial_backward,
            disable_autocast=engine.is_any_autocast_enabled(),
            needs_grad_mode=not inference and not torch.is_grad_enabled(),
        )


_EMPTY = fx.GraphModule(torch.nn.Module(), fx.Graph())
_EMPTY.graph.output([])


def _forward_only(joint: JointGraph) -> fx.GraphModule:
    """The joint graph without tangents and gradients."""
    graph = fx.Graph()
    count = joint.signature.num_forward_outputs
    made: dict[fx.Node, fx.Node] = {}
    needed = _reachable([n for n in joint.outputs()[:count] if n is not None], joint)
    for node in joint.graph.nodes:
        if node.op == "output":
            graph.output([made[n] for n in joint.outputs()[:count]])
        elif node in needed or (node.op == "placeholder" and not node.name.startswith("tangents_")):
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = node.meta
    return make_graph_module(joint.module, graph, "Forward")


def _reachable(outputs: list[fx.Node], joint: JointGraph) -> set[fx.Node]:
    random = [
        n
        for n in joint.graph.nodes
        if n.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]
    needed: set[fx.Node] = set()
    stack = [*outputs, *random]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _compile_late(compiler: Compiler, module: fx.GraphModule, joint: JointGraph) -> Boxed:
    """Compile a backward, when the check of the arguments is long written: it can't take conditions on sizes any more.

    A compiler that makes some of a symbolic size is not used for this graph; our own makes none.
    """
    known = joint.num_guards()
    compiled = _compile(compiler, module, joint.name, "backward")
    if joint.num_guards() > known:
        return _compile(eager_compiler, module, joint.name, "backward")
    return compiled


def _compile(compiler: Compiler, module: fx.GraphModule, name: str, phase: str) -> Boxed:
    example_inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with torch.no_grad(), engine.disable_autocast(), graph_being_compiled(phase):
        try:
            result = compiler(module, example_inputs)
        except ForegradError:
            raise
        except Exception as error:
            error.add_note(f"while the backend compiled the {phase} graph of `{name}`") if hasattr(
                error, "add_note"
            ) else None
            raise
        if not callable(result):
            raise BackendError(
                f"the compiler of the {phase} graph of `{name}` returned a {type(result).__name__}, not a callable"
            )
        return as_boxed(result)
