"""Compilers' questions about a graph, and a setting of PyTorch's partitioner.

Checked on torch 2.11.0, 2.13.0, 2.15.0.
"""

from __future__ import annotations

from typing import Any


def facts_at_hand() -> Any:
    """The running compiler's facts about its function: `TracingContext.fw_metadata`; None outside a compilation."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def activation_budget() -> float:
    """`torch._functorch.config.activation_memory_budget`: 1.0 where nobody has set it."""
    from torch._functorch import config

    return float(config.activation_memory_budget)
