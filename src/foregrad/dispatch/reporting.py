"""Logs of a compilation, and its texts in PyTorch's structured trace, which `tlparse` shows."""

from __future__ import annotations

import logging

from .._torch.structured import trace_artifact
from ..graph.joint import JointGraph
from ..partitioners.report import Parts

__all__ = ["log_graph", "log_guards", "log_partition"]

_graphs, _partition, _guards = (logging.getLogger(f"foregrad.{name}") for name in ("graphs", "partition", "guards"))


def log_graph(joint: JointGraph) -> None:
    """Log the graph of a capture."""
    if _graphs.isEnabledFor(logging.INFO):
        _graphs.info("%s", joint)
    trace_artifact("foregrad_joint_graph", lambda: str(joint))


def log_partition(parts: Parts) -> None:
    """Log the split of a joint graph."""
    signature = parts.joint.signature
    if signature.is_inference or parts.joint.backward_error is not None:
        return
    if _partition.isEnabledFor(logging.INFO):
        _partition.info("%s: %s", parts.joint.name, parts.report())
        _partition.debug("%s", parts)
    trace_artifact("foregrad_partition", lambda: f"{parts.report()}\n\n{parts}")


def log_guards(name: str, source: str) -> None:
    """Log the code around a graph."""
    _guards.info("%s:\n%s", name, source)
    trace_artifact("foregrad_guards", lambda: source)
