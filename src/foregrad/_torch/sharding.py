"""DTensor's propagation of sizes, which is no part of a program. Checked on torch 2.13.0.

DTensor runs an operator on fakes of the whole tensors, the first time. A capture would record that as work of the
function, and random numbers drawn there would be drawn in each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .dynamo import without_modes

__all__ = ["install", "remove"]

_MODULE, _CLASS = "torch.distributed.tensor._sharding_prop", "ShardingPropagator"
_METHOD = "_propagate_tensor_meta_non_cached"
_originals: list[Callable[..., Any]] = []


def _owner() -> Any:
    return getattr(sys.modules.get(_MODULE), _CLASS, None)


def install(is_capturing: Callable[[], bool]) -> None:
    """Hide the propagation from captures, on threads on which `is_capturing()` is true."""
    owner = _owner()
    original = getattr(owner, _METHOD, None)
    if original is None:
        return

    def propagate(self: Any, schema: Any) -> Any:
        if not is_capturing():
            return original(self, schema)
        with without_modes():
            return original(self, schema)

    _originals.append(original)
    setattr(owner, _METHOD, propagate)


def remove() -> None:
    """Restore torch's own."""
    if _originals:
        setattr(_owner(), _METHOD, _originals.pop())
