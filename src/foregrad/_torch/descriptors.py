"""PyTorch's classes of descriptors, where the installed PyTorch has them. Checked on torch 2.11.0, 2.13.0, 2.15.0.

They are data: names and fields, tested by `isinstance` in clients. Their module imports nothing of PyTorch's engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def descriptor_classes() -> Any:
    """The module that holds the classes; None where there is none."""
    try:
        return importlib.import_module("torch._functorch._aot_autograd.descriptors")
    except ImportError:
        return None


def joint_pass() -> Callable[..., Any] | None:
    """The pass over joint graphs that the user's settings of PyTorch ask for."""
    from torch._functorch import config

    found = getattr(config, "joint_custom_pass", None)
    return found if callable(found) else None
