"""Gradients that are given out in stages while the backward runs, for consumers of the first ones.

`DistributedDataParallel` reduces a bucket of gradients as soon as all have arrived, beside further computation. A node
gives all its gradients at once. So the inputs of later stages go through stage nodes of their own; in any other
backward these only pass gradients on. The function's backward runs the first stage, gives the stage nodes tensors
without elements, and leaves the rest to the nodes. The engine accumulates a stage's gradients before it goes on to the
next node, the node made last.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import engine
from .._torch.graphs import piece
from ..graph.meta import TensorSpec
from ..graph.role import STAGE
from ..graph.signature import Signature
from ..graph.source import unpacked
from .buckets import in_buckets

__all__ = ["in_buckets"]  # handed on

_NOTHING = "_foregrad_nothing"  # an attribute of tensors that stand for gradients to come
_entered = threading.local()
Boxed = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """`module`: (values handed over, tangents) -> (gradients of `inputs`, values that later stages read).

    `takes`: the names of its inputs; `hands`: the names of its results besides the gradients.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    takes: tuple[str, ...]
    hands: tuple[str, ...]


def cut_in_stages(backward: fx.GraphModule, stages: Sequence[tuple[int, ...]]) -> list[Stage]:
    """The stages of a backward graph, each cut after its last gradient."""
    nodes = [node for node in backward.graph.nodes if node.op not in ("output", "get_attr")]
    position = {node: at for at, node in enumerate(nodes)}
    gradients = next(iter(reversed(backward.graph.nodes))).args[0]
    ends = [0]
    for stage in stages[:-1]:
        ends.append(max(ends[-1], *(position[gradients[i]] + 1 for i in stage)))
    ends.append(len(nodes))
    later: list[set[fx.Node]] = [set()]  # the nodes read after each stage, the last first
    for stage, start, end in reversed(list(zip(stages, ends, ends[1:], strict=False))):
        needed = {n for node in nodes[start:end] for n in node.all_input_nodes} | {gradients[i] for i in stage}
        later.insert(0, later[0] | needed)
    cut = []
    for number, (stage, start, end) in enumerate(zip(stages, ends, ends[1:], strict=False)):
        own = [node for node in nodes[start:end] if node.op != "placeholder"]
        cut.append(_stage(backward, own, [gradients[i] for i in stage], later[number + 1], stage))
    return cut


def _stage(
    backward: fx.GraphModule, own: list[fx.Node], gradients: list[fx.Node], later: set[fx.Node], inputs: tuple[int, ...]
) -> Stage:
    inside = set(own)
    needed = dict.fromkeys(n for node in own for n in node.all_input_nodes if n.op != "get_attr")
    needed |= dict.fromkeys(gradients)
    operands = sorted((n for n in needed if n not in inside), key=lambda n: n.name.startswith("tangents_"))
    hands = [node for node in own if node in later]
    module = piece(backward, operands, own, [*gradients, *hands], "Stage")
    module.meta[STAGE] = inputs
    return Stage(module, inputs, tuple(n.name for n in operands), tuple(n.name for n in hands))


class _StagedCall:
    """One call of a function with a backward in stages; `run`: the later stages of a backward that has begun."""

    def __init__(self) -> None:
        self.run: _StagedBackward | None = None

    def follow(self, node: Any) -> None:
        """Watch `node`, the node of the call."""
        node.register_prehook(self._enter)

    def _enter(self, _: object) -> None:
        self.run = None
        _entered.call = self

    def gradients(self, stage: int) -> Sequence[Any] | None:
        """Run a stage: its gradients; None if the node's own backward did not run."""
        return None if self.run is None else self.run.gradients(stage)


class _Later(torch.autograd.Function):
    """The inputs of a later stage."""

    @staticmethod
    def forward(ctx: Any, call: _StagedCall, stage: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.stage = call, stage
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *arriving: object) -> tuple[object, ...]:
        own = ctx.call.gradients(ctx.stage)
        if own is None:
            return None, None, *arriving
        sums = (a if b is None or hasattr(b, _NOTHING) else a + b for a, b in zip(own, arriving, strict=False))
        return None, None, *sums


_later: Callable[..., tuple[torch.Tensor, ...]] = engine.direct_apply(_Later)


def later_lines(
    writer: Any, signature: Signature, inputs: list[str], outputs: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """(the inputs of a function's node; lines that make inputs with later gradients, the last stage first; lines after
    the call of the node). `writer` is the `LineWriter` of the call.
    """
    inputs, call = list(inputs), writer.names.fresh("call")
    lines = [f"{call} = {writer.bind('Call', _StagedCall)}()"]
    for number, stage in reversed(list(enumerate(signature.gradients.stages))[1:]):
        arguments = ", ".join([call, str(number), *(inputs[index] for index in stage)])
        for index in stage:
            inputs[index] = writer.names.fresh(f"later_{inputs[index]}")
        targets = unpacked([inputs[index] for index in stage])
        lines.append(f"{targets}{writer.bind('later', _later)}({arguments})")
    return inputs, lines, [f"{call}.follow({outputs[signature.gradients.differentiable[0]]}.grad_fn)"]


class _StagedBackward:
    """One backward after its first stage."""

    def __init__(self, stages: Sequence[Stage], calls: Sequence[Boxed], values: dict[str, object]) -> None:
        self.stages, self.calls, self.values = stages, calls, values
        self.done = 0
        self.gradients_by_stage: dict[int, Sequence[object]] = {}  # by stage

    def gradients(self, number: int) -> Sequence[Any] | None:
        """The gradients of a stage, given out once."""
        while self.done <= number:
            stage = self.stages[self.done]
            read = [self.values[name] for name in stage.takes]
            needed = {name for later in self.stages[self.done + 1 :] for name in later.takes}
            for name in self.values.keys() - needed:  # the stage frees them after their last use
                del self.values[name]
            with engine.disable_autocast():
                out = self.calls[self.done](read)
            self.gradients_by_stage[self.done] = out[: len(stage.inputs)]
            self.values.update(zip(stage.hands, out[len(stage.inputs) :], strict=True))
            self.done += 1
        return self.gradients_by_stage.pop(number, None)


def in_stages(module: fx.GraphModule, signature: Signature, compiled: Callable[[fx.GraphModule, int], Boxed]) -> Boxed:
    """A backward that gives the gradients of its first stage, and placeholders for the gradients of later stages.
    `compiled`: compiles the graph of a stage, with so many results.
    """
    stages = cut_in_stages(module, signature.gradients.stages)
    calls = [compiled(stage.module, len(stage.inputs) + len(stage.hands)) for stage in stages]
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    specs = [info.spec for info in signature.inputs]

    def backward(values: list[object]) -> list[Any]:
        call: _StagedCall | None = getattr(_entered, "call", None)
        _entered.call = None
        run = _StagedBackward(stages, calls, dict(zip(names, values, strict=True)))
        values.clear()
        gradients: list[object] = [None] * len(specs)
        for number, stage in enumerate(stages):
            if number and call is not None:
                stage_gradients: Sequence[object] = [_nothing(specs[index]) for index in stage.inputs]
            else:
                stage_gradients = run.gradients(number) or ()
            for index, gradient in zip(stage.inputs, stage_gradients, strict=True):
                gradients[index] = gradient
        if call is not None:
            call.run = run
        return gradients

    return backward


def _nothing(spec: TensorSpec) -> torch.Tensor:
    placeholder = torch.zeros((), dtype=spec.dtype, device=spec.device).expand(spec.shape)
    setattr(placeholder, _NOTHING, True)
    return placeholder
