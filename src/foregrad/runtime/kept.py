"""What a node saved, of which a backward reads only some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["saved_in_part"]


def saved_in_part(ctx: Any, read: Sequence[bool]) -> Sequence[Any]:
    """The node's saved tensors, where those that are not read may have been written to since (None in their place).

    In eager they belong to other nodes, which do not run.
    """
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError:
        if all(read):
            raise
        unpack = _unpack(ctx)
        if unpack is None:
            raise
        found = []
        for position, is_read in enumerate(read):
            try:
                found.append(unpack(position))
            except RuntimeError:
                if is_read:
                    break
                found.append(None)
        else:
            return found
        raise


def _unpack(ctx: Any) -> Callable[[int], Any] | None:
    """What gives one saved tensor of a node, by its position. Nothing does for a node in Python on torch 2.11."""
    if hasattr(ctx, "saved_tensor"):  # one of ours, in C++
        return ctx.saved_tensor  # type: ignore[no-any-return]
    saved = ctx._raw_saved_tensors
    return (lambda position: saved[position].unpack()) if all(hasattr(s, "unpack") for s in saved) else None
