"""How a joint graph becomes a forward and a backward: what is saved between them, and what is computed again."""

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
