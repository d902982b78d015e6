"""State that is too large to copy or to look through unless code names it: long containers, and arrays.

A capture copies what its function may write to, to take the writes back, and guards what the function reads. Where
code names such state, a buffer of up to `_MOST_BYTES` is copied, and a container of plain values and tensors is guarded
by its items' identity. Larger buffers, and long containers of objects that may change, are refused by name.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Sequence
from types import CodeType
from typing import Any

import torch

from ..errors import UnsupportedSideEffectError
from ..frontend.values import is_plain
from ..graph.source import a_name
from .holders import Holder, HolderKind
from .libraries import is_of_library
from .objects import MAKERS

MOST_ITEMS = 10_000  # of a container that is looked into
_FEW_BYTES, _MOST_BYTES = 1 << 20, 1 << 26  # of a buffer that is copied: in any case; where code names it
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)


class LargeState:
    """The long containers and large buffers that a walk has met, until code names them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Holder, int]] = []  # and a buffer's bytes, else 0
        self._names: set[str] = set()

    def meet(self, code: CodeType, names: Collection[str]) -> None:
        """Code with these names may run. A constructor fills the object that it makes."""
        if code.co_name not in MAKERS:
            self._names.update(names)

    def add(self, container: Holder) -> None:
        """Wait for the name of a long container. Its tensors are held already."""
        self._waiting.append((container, 0))

    def takes(self, buffer: Any, parent: Holder | None, step: Any, kind: HolderKind, nbytes: int) -> bool:
        """Whether a buffer is so large that it waits for its name."""
        if nbytes > _FEW_BYTES:
            self._waiting.append((Holder(kind, buffer, parent, step, "", None), nbytes))
        return nbytes > _FEW_BYTES

    def named(self) -> Iterator[Holder]:
        """The buffers that code names now. Raises UnsupportedSideEffectError for what can't be held."""
        for found in [found for found in self._waiting if found[0].is_named(self._names)]:
            self._waiting.remove(found)
            place, nbytes = found
            if not nbytes:
                looked_into([*place.items()], place.name())
            elif nbytes > _MOST_BYTES:
                raise UnsupportedSideEffectError(
                    f"`{place.name()}` has {nbytes >> 20:,} MiB that the function may write to, and a capture copies "
                    f"at most {_MOST_BYTES >> 20}. Pass a tensor, or the part that the function needs."
                )
            else:
                yield place


def looked_into(items: Sequence[tuple[Any, Any]], name: str) -> Sequence[tuple[Any, Any]]:
    """The items of a container, or none of a long one, where the identity of each is guarded.

    Raises UnsupportedSideEffectError for a long one with objects that may change.
    """
    if len(items) <= MOST_ITEMS:
        return items
    for _, item in items:
        is_fixed = is_plain(item) or isinstance(item, torch.Tensor)
        if not is_fixed and (isinstance(item, CONTAINERS) or not is_of_library(type(item))):
            raise UnsupportedSideEffectError(
                f"`{name}` has {len(items):,} items, among them {a_name(type(item).__name__)}, and a graph looks into "
                f"at most {MOST_ITEMS:,}. Pass the items that the function needs as arguments."
            )
    return ()
