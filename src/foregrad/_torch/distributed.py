"""What `torch.distributed` hands to functions, and its modules that talk to other processes around their forward.

Checked on torch 2.13.0. These modules' classes are looked up only once they are imported: most programs have none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["GROUPS", "data_parallel"]

_named = [getattr(torch.distributed, name, None) for name in ("DeviceMesh", "ProcessGroup")]
GROUPS: tuple[type, ...] = tuple(cls for cls in _named if isinstance(cls, type))
"""Classes of objects that say which processes there are: nothing but themselves to a function."""

# Classes; `fully_shard` does it in hooks around the forward, the others in the forward itself.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)
_BY_HOOKS = {"FSDPModule": "`fully_shard`"}


def data_parallel(module: Any, *, in_forward: bool = False) -> str | None:
    """What makes a module talk to others when it is called, or `in_forward`, when only its forward is; else None."""
    for imported, name in _WRAPPERS:
        cls: Any = getattr(sys.modules.get(imported), name, None)
        if cls is not None and isinstance(module, cls) and not (in_forward and name in _BY_HOOKS):
            return _BY_HOOKS.get(name, f"`{name}`")
    return None
