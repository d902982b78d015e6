"""Partitioners divide a joint graph into forward and backward: they choose the residuals to save and the values to
recompute.

The names here are for whoever writes a partition, or judges one.
"""

from __future__ import annotations

from ..tracing.tape.opinfo import op_info
from .classify import Kind, kind_of
from .costs import flops, is_counted
from .default import default_partition, policy_partition
from .index import JointIndex, merge_equal, value_bytes
from .liveness import is_offloaded
from .mincut import fused_partition, min_cut_rematerialization_partition
from .report import Half, Halves, Report, SavedValue, Table, amount, halves_of, in_bytes, make_report, seconds
from .split import Split, check_split, split

__all__ = [
    "Half",
    "Halves",
    "JointIndex",
    "Kind",
    "Report",
    "SavedValue",
    "Split",
    "Table",
    "amount",
    "check_split",
    "default_partition",
    "flops",
    "fused_partition",
    "halves_of",
    "in_bytes",
    "is_counted",
    "is_offloaded",
    "kind_of",
    "make_report",
    "merge_equal",
    "min_cut_rematerialization_partition",
    "op_info",
    "policy_partition",
    "seconds",
    "split",
    "value_bytes",
]
