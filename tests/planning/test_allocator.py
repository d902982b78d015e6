"""The rules of CUDA's caching allocator, one by one."""

from __future__ import annotations

import itertools
import random

import pytest

from foregrad.planning.allocator import Allocator

MIB = 1 << 20


def reserved(*events, expandable=False):
    """Events: (memory, bytes) or (memory, bytes, stream)."""
    allocator = Allocator(expandable=expandable)
    allocator.run((key, size, *(rest or (0,))) for key, size, *rest in events)
    found = allocator.result()
    return found.reserved, found.allocated


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, (2 * MIB, 512)),
        (MIB, (2 * MIB, MIB)),
        (MIB + 1, (20 * MIB, MIB + 512)),
        (10 * MIB - 512, (20 * MIB, 10 * MIB - 512)),
        (10 * MIB, (10 * MIB, 10 * MIB)),
        (11 * MIB - 512, (12 * MIB, 11 * MIB - 512)),
        (11 * MIB, (12 * MIB, 12 * MIB)),  # a rest of 1 MiB stays with the block
        (13 * MIB + 512, (14 * MIB, 14 * MIB)),
    ],
)
def test_the_segment_for_one_block(size, expected):
    assert reserved((1, size)) == expected


def test_a_block_that_was_let_go_is_taken_again():
    assert reserved((1, 30 * MIB), (1, 0), (2, 30 * MIB))[0] == 30 * MIB
    assert reserved((1, 30 * MIB), (1, 0), (2, 20 * MIB), (3, 10 * MIB))[0] == 30 * MIB
    assert reserved((1, 30 * MIB), (1, 0), (2, 32 * MIB))[0] == 62 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    there = [(1, 60 * MIB), (2, 30 * MIB), (3, 40 * MIB), (1, 0), (2, 0), (3, 0)]
    assert reserved(*there, (4, 28 * MIB), (5, 38 * MIB), (6, 58 * MIB))[0] == 130 * MIB


def test_neighbours_that_are_let_go_join():
    parts = [(0, 60 * MIB), (0, 0), (1, 20 * MIB), (2, 20 * MIB), (3, 20 * MIB)]
    assert reserved(*parts, (1, 0), (2, 0), (4, 40 * MIB))[0] == 60 * MIB
    assert reserved(*parts, (2, 0), (1, 0), (4, 40 * MIB))[0] == 60 * MIB
    assert reserved(*parts, (1, 0), (3, 0), (4, 40 * MIB))[0] == 100 * MIB


def test_what_one_stream_let_go_serves_no_other():
    assert reserved((1, 30 * MIB, 0), (1, 0), (2, 30 * MIB, 1)) == (60 * MIB, 30 * MIB)


def test_small_blocks_are_apart_from_large_ones():
    assert reserved((1, 30 * MIB), (1, 0), (2, 1000))[0] == 32 * MIB


def test_an_expandable_segment_grows_at_its_end():
    holes = [(1, 40 * MIB), (2, 40 * MIB), (1, 0)]
    assert reserved(*holes, (3, 60 * MIB))[0] == 140 * MIB
    assert reserved(*holes, (3, 60 * MIB), expandable=True)[0] == 140 * MIB
    ending = [(1, 40 * MIB), (2, 40 * MIB), (2, 0)]
    assert reserved(*ending, (3, 60 * MIB))[0] == 140 * MIB
    assert reserved(*ending, (3, 60 * MIB), expandable=True)[0] == 100 * MIB
    assert reserved((1, 3 * MIB), expandable=True)[0] == 20 * MIB


def test_a_block_at_the_end_of_an_expandable_segment_is_the_last_choice():
    events = [(1, 20 * MIB), (2, 20 * MIB), (3, 20 * MIB), (1, 0), (3, 0)]
    # The free block of 20 MiB at the beginning is taken, though the one at the end is as large.
    assert reserved(*events, (4, 20 * MIB), (5, 40 * MIB), expandable=True)[0] == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_never_overlaps_and_fits_what_is_reserved(seed, expandable):
    draw = random.Random(seed)
    allocator, alive = Allocator(expandable=expandable), {}
    for key in range(600):
        if alive and draw.random() < 0.48:
            gone = draw.choice(list(alive))
            del alive[gone]
            allocator.run([(gone, 0, 0)])
        size = draw.choice([700, 900_000, 3 * MIB, 17 * MIB, 45 * MIB]) + draw.randrange(5000)
        alive[key] = size
        allocator.run([(key, size, 0)])
        pools = {}
        for pool, block in allocator._taken.values():
            pools.setdefault(id(pool), []).append((block.at, block.at + block.size))
        for spans in pools.values():
            ordered = sorted(spans)
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))
    assert sum(alive.values()) <= allocator.allocated <= allocator.result().reserved
