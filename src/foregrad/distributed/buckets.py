"""A backward in stages under `DistributedDataParallel`: a bucket's gradients are sent while later stages compute."""

from __future__ import annotations

from ..graph.joint import JointGraph
from ..passes.stages import with_stages
from ._torch.distributed import bucket_sizes


def in_buckets(joint: JointGraph) -> JointGraph:
    """The joint graph with the stages that the running module asks for; itself where none runs."""
    buckets = bucket_sizes()
    return with_stages(joint, buckets) if buckets else joint
