"""A backward in stages under `DistributedDataParallel`: a bucket's gradients are sent while later stages compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..graph.effect_log import Write
from ..graph.joint import JointGraph, queued_to_arrive
from ..graph.signature import Signature
from ..graph.slots import Param
from ..passes.opaque import opaque_values
from ._torch.distributed import bucket_sizes


def in_buckets(joint: JointGraph) -> JointGraph:
    """The joint graph with the stages that the running module asks for; itself where none runs."""
    buckets = bucket_sizes()
    return with_stages(joint, buckets) if buckets else joint


def with_stages(joint: JointGraph, sizes: Sequence[int]) -> JointGraph:
    """The joint graph with the stages of its backward; see `_stages_of`."""
    if joint.failing or joint.raising or joint.error is not None or opaque_values().nodes(joint.graph):
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
