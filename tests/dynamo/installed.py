"""For tests that run from a source tree: what an installation does with an entry point."""

from __future__ import annotations


def make_known() -> None:
    """Register the backend `foregrad` with torch.compile, unless an installation has."""
    from torch._dynamo.backends import registry

    from foregrad.dynamo import foregrad_backend

    if "foregrad" not in registry.list_backends(exclude_tags=()):
        registry.register_backend(foregrad_backend, name="foregrad")
