"""Partitioners divide a joint graph into forward and backward: which residuals are saved, which are recomputed."""

from __future__ import annotations

from .budget import budget_partition
from .default import default_partition, policy_partition
from .index import JointIndex
from .mincut import fused_partition, min_cut_rematerialization_partition
from .split import Split, check_split, split

__all__ = [
    "JointIndex",
    "Split",
    "budget_partition",
    "check_split",
    "default_partition",
    "fused_partition",
    "min_cut_rematerialization_partition",
    "policy_partition",
    "split",
]
