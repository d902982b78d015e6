"""The bytes that PyTorch's caching allocator of a CUDA device reserves for a sequence of allocations.

Its rules, as PyTorch documents them and its source has them; none is fitted:

* Sizes are rounded up to 512 bytes. Memories of at most 1 MiB come from the small pool, larger ones from the large.
* Each stream has pools of its own: a block that a stream let go serves this stream alone.
* Of the free blocks of a pool the smallest that is large enough is taken, of equal ones the first in memory. The rest
  stays free, if it has 512 bytes in the small pool, or more than 1 MiB in the large; blocks that are let go join free
  neighbours.
* Where no free block is large enough, the device is asked for a segment: 2 MiB for small blocks, 20 MiB for
  sizes below 10 MiB, else the size rounded up to 2 MiB.
* With `expandable_segments:True` each pool is a segment that grows at its end, in steps of 2 MiB (small) or 20 MiB
  (large); a free block at the end grows too, and any rest of 512 bytes stays free.

Segments are never given back: PyTorch does so only before it runs out of memory.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

_ROUND, _SMALL, _MIB = 512, 1 << 20, 1 << 20
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT = 2 * _MIB, 20 * _MIB, 10 * _MIB

Event = tuple[int, int, int]  # (a number for the memory, its bytes or 0 where it is let go, the stream)


class _Block:
    __slots__ = ("at", "before", "is_free", "later", "size")

    def __init__(self, at: int, size: int, before: _Block | None = None, later: _Block | None = None) -> None:
        self.at, self.size, self.before, self.later, self.is_free = at, size, before, later, True


class _Pool:
    """The blocks of a stream, small or large."""

    def __init__(self, *, is_small: bool, expandable: bool) -> None:
        self.is_small, self.expandable = is_small, expandable
        self.reserved = 0
        self.last: _Block | None = None  # of the segment that grows
        self._free: list[tuple[int, int]] = []  # (size, where), in order
        self._by_place: dict[int, _Block] = {}

    def take(self, size: int) -> _Block:
        block = self._found(size)
        if block is None:
            block = self._grown(size) if self.expandable else self._segment(size)
        else:
            self._forget(block)
        rest = block.size - size
        if rest >= _ROUND if self.is_small or self.expandable else rest > _SMALL:
            other = _Block(block.at + size, rest, block, block.later)
            if other.later is not None:
                other.later.before = other
            block.size, block.later = size, other
            if block is self.last:
                self.last = other
            self._remember(other)
        block.is_free = False
        return block

    def give(self, block: _Block) -> None:
        before, later = block.before, block.later
        if before is not None and before.is_free:
            self._forget(before)
            before.size += block.size
            before.later = later
            if later is not None:
                later.before = before
            if block is self.last:
                self.last = before
            block = before
        if later is not None and later.is_free:
            self._forget(later)
            block.size += later.size
            block.later = later.later
            if later.later is not None:
                later.later.before = block
            if later is self.last:
                self.last = block
        self._remember(block)

    def _found(self, size: int) -> _Block | None:
        """The smallest block that is large enough; the block at the end, since that can grow, comes last."""
        at = bisect.bisect_left(self._free, (size, -1))
        for _, place in self._free[at : at + 2]:
            block = self._by_place[place]
            if not self.expandable or block is not self.last:
                return block
        return self._by_place[self._free[at][1]] if at < len(self._free) else None

    def _segment(self, size: int) -> _Block:
        if self.is_small:
            asked = _SMALL_SEGMENT
        else:
            asked = _LARGE_SEGMENT if size < _OWN_SEGMENT else _up(size, _SMALL_SEGMENT)
        block = _Block(self.reserved, asked)  # without neighbours: blocks of two segments never join
        self.reserved += asked
        return block

    def _grown(self, size: int) -> _Block:
        block = self.last
        if block is not None and block.is_free:
            self._forget(block)
        else:
            block = _Block(self.reserved, 0, block)
            if block.before is not None:
                block.before.later = block
            self.last = block
        more = _up(size - block.size, _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT)
        block.size += more
        self.reserved += more
        return block

    def _remember(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free, (block.size, block.at))
        self._by_place[block.at] = block

    def _forget(self, block: _Block) -> None:
        at = bisect.bisect_left(self._free, (block.size, block.at))
        del self._free[at], self._by_place[block.at]


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes at their most: `reserved` by the allocator, and `allocated` in blocks that are in use at once, as the
    allocator counts them. `by_stream`: of `reserved`, for each stream.
    """

    reserved: int
    allocated: int
    by_stream: dict[int, int]


class Allocator:
    """The allocator of a device. `expandable`: as with `PYTORCH_ALLOC_CONF=expandable_segments:True`."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.most = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._taken: dict[int, tuple[_Pool, _Block]] = {}

    def run(self, events: Iterable[Event]) -> None:
        """Take and give back memories in this order."""
        for key, size, stream in events:
            if not size:
                pool, block = self._taken.pop(key)
                self.allocated -= block.size
                pool.give(block)
                continue
            size = _up(size, _ROUND)
            which = stream, size <= _SMALL
            if which not in self._pools:
                self._pools[which] = _Pool(is_small=which[1], expandable=self.expandable)
            block = self._pools[which].take(size)
            self._taken[key] = self._pools[which], block
            self.allocated += block.size
            self.most = max(self.most, self.allocated)

    def result(self) -> Reserved:
        by_stream: dict[int, int] = {}
        for (stream, _), pool in self._pools.items():
            by_stream[stream] = by_stream.get(stream, 0) + pool.reserved
        return Reserved(sum(by_stream.values()), self.most, by_stream)
