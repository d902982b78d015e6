"""PyTorch's structured trace, which `tlparse` reads (`TORCH_TRACE`). Checked on torch 2.11.0, 2.13.0, 2.15.0."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_log, trace_structured


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text under a name into the trace, if it is on."""
    # PyTorch's handler exists without a folder too, until the first write: the text would be made in vain.
    if any(getattr(handler, "root_dir", "") is not None for handler in trace_log.handlers):
        metadata = {"name": name, "encoding": "string"}
        trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text, expect_trace_id=False)
