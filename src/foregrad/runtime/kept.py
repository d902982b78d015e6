"""What a node saved, of which a backward reads only some."""

from __future__ import annotations

from collections.abc import Sequence
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
        found = []
        for tensor, is_read in zip(ctx._raw_saved_tensors, read, strict=True):
            try:
                found.append(tensor.unpack())
            except RuntimeError:
                if is_read:
                    break
                found.append(None)
        else:
            return found
        raise
