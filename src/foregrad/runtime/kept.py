"""What a node saved, of which a backward reads only some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .release import held, parts_run

__all__ = ["saved_in_part"]


def saved_in_part(ctx: Any, read: Sequence[bool]) -> Sequence[Any]:
    """The node's saved tensors, where those that are not read may have been written to since (None in their place).

    In eager they belong to other nodes, which do not run.
    """
    if not read:
        return ()
    parts = parts_run(ctx)
    if parts is not None and hasattr(ctx, "kept"):
        return held(ctx, read)
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError:
        if all(read) and parts is None:
            raise
        unpack = _unpack(ctx)
        if unpack is None:
            raise
        found = []
        for position, is_read in enumerate(read):
            try:
                found.append(unpack(position))
            except RuntimeError:
                if is_read and parts is not None:
                    raise
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
    try:
        saved = ctx._raw_saved_tensors
    except RuntimeError:  # let go of, all of them
        return lambda position: ctx.saved_tensors[position]
    return (lambda position: saved[position].unpack()) if all(hasattr(s, "unpack") for s in saved) else None
