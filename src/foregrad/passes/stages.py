"""A backward cut into stages, each with the gradients of some inputs: see `runtime/stages.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from .._torch.graphs import piece
from ..graph.effect_log import Write
from ..graph.joint import JointGraph, queued_to_arrive
from ..graph.signature import Signature
from ..graph.slots import Param

_KEY = "foregrad stage"


def stage_of(module: fx.GraphModule) -> tuple[int, ...] | None:
    """The inputs that a stage's first results are gradients of; None if the graph is no stage."""
    inputs: tuple[int, ...] | None = module.meta.get(_KEY)
    return inputs


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """`module`: (values handed over, tangents) -> (gradients of `inputs`, values that later stages read).

    `takes`: the names of its inputs; `hands`: the names of its results besides the gradients.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    takes: tuple[str, ...]
    hands: tuple[str, ...]


def with_stages(joint: JointGraph, sizes: Sequence[int]) -> JointGraph:
    """The joint graph with the stages of its backward; see `_stages_of`."""
    if joint.failing or joint.raising or joint.error is not None:
        return joint
    stages = _stages_of(joint.signature, sizes)
    gradients = dataclasses.replace(joint.signature.gradients, stages=stages)
    return dataclasses.replace(joint, signature=dataclasses.replace(joint.signature, gradients=gradients))


def _stages_of(signature: Signature, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The inputs of each stage: parameters, in the order of arrival of eager's gradients, until they have `sizes` bytes
    (the last size holds for all further stages). All other inputs are in the last stage. Empty for one stage.

    A function has one stage if it has effects on inputs with gradients, or effects on autograd beyond its node.
    """
    s = signature
    watched = any(effect.sees_gradients for effect in s.effects.around)
    writes = [e for e in s.effects.log if not (isinstance(e, Write) and e.is_whole) or s.gradients.returned[e.input]]
    differentiable = [info for info, has in zip(s.inputs, s.gradients.returned, strict=True) if has]
    more = (
        watched,
        writes,
        s.backward,
        s.gradients.passed,
        s.has_wrappers,
        s.stops.decisions,
        s.stops.checks,
        s.gradients.rootless,
    )
    if not sizes or s.is_inference or any(more) or any(not info.spec.is_static for info in differentiable):
        return ()
    parameters = [i for i in s.gradients.arrival if s.gradients.returned[i] and isinstance(s.inputs[i].slot, Param)]
    stages: list[list[int]] = [[]]
    left = sizes[0]
    for index in parameters:
        if left <= 0:
            left = sizes[min(len(stages), len(sizes) - 1)]
            stages.append([])
        left -= int(s.inputs[index].spec.nbytes)
        stages[-1].append(index)
    in_order = set(parameters)
    stages[-1] += [i for i, has in enumerate(s.gradients.returned) if has and i not in in_order]
    leaves = {i for i, info in enumerate(s.inputs) if info.is_leaf}
    return (
        tuple(tuple(queued_to_arrive(stage, s.gradients.arrival, leaves)) for stage in stages)
        if len(stages) > 1
        else ()
    )


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
    module.meta[_KEY] = inputs
    return Stage(module, inputs, tuple(n.name for n in operands), tuple(n.name for n in hands))
