"""For tests that run from a source tree: what an installation does with an entry point."""

from __future__ import annotations

import os
import tempfile

import torch


def make_known() -> None:
    """Register the backend `foregrad` with torch.compile, unless an installation has."""
    from torch._dynamo.backends import registry

    from foregrad.dynamo import foregrad_backend

    if "foregrad" not in registry.list_backends(exclude_tags=()):
        registry.register_backend(foregrad_backend, name="foregrad")


def keep_kernels() -> None:
    """Give Inductor a folder of its own for what it compiles, kept between runs: compiling C++ takes seconds."""
    folder = os.path.join(tempfile.gettempdir(), f"foregrad-tests-inductor-{torch.__version__}-{os.getuid()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
