"""PyTorch's structured trace, which `tlparse` reads (`TORCH_TRACE`). Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["trace_artifact"]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text under a name into the trace, where it is on."""
    import torch._logging as torch_logging

    torch_logging.trace_structured(  # type: ignore[attr-defined]
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False
    )
