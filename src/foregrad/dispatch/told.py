"""Logs of a compilation, and its texts in PyTorch's structured trace, which `tlparse` shows."""

from __future__ import annotations

import logging

from .._torch.structured import trace_artifact
from ..graph.joint import JointGraph
from ..partitioners.report import Parts

__all__ = ["tell_graph", "tell_guards", "tell_partition"]

_graphs, _partition, _guards = (logging.getLogger(f"foregrad.{name}") for name in ("graphs", "partition", "guards"))


def tell_graph(joint: JointGraph) -> None:
    """A function was captured."""
    if _graphs.isEnabledFor(logging.INFO):
        _graphs.info("%s", joint)
    trace_artifact("foregrad_joint_graph", lambda: str(joint))


def tell_partition(parts: Parts) -> None:
    """A joint graph was split."""
    signature = parts.joint.signature
    if signature.is_inference or parts.joint.backward_error is not None:
        return
    if _partition.isEnabledFor(logging.INFO):
        _partition.info("%s: %s", parts.joint.name, parts.report())
        _partition.debug("%s", parts)
    trace_artifact("foregrad_partition", lambda: f"{parts.report()}\n\n{parts}")


def tell_guards(name: str, source: str) -> None:
    """The code around a graph was written."""
    _guards.info("%s:\n%s", name, source)
    trace_artifact("foregrad_guards", lambda: source)
