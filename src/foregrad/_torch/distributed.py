"""Modules of `torch.distributed` that talk to other processes around their forward. Checked on torch 2.13.0.

Their modules are looked up only where they are imported: most programs have none.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["data_parallel"]

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
