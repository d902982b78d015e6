"""A compiler that keeps compiled graphs finds one only together with what it found out about sizes while compiling."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.backends.eager import eager_compiler
from foregrad.graph.role import role_of
from tests.cache.kept import fresh_cache, keys_in, prepare

COMPILED = {}  # what the compiler keeps "on disk", by the tag that it was given
MADE = []


def careless_compiler(gm, example_inputs):
    """Makes one program for even first sizes and one for odd ones, and asks no more once it has kept it."""
    role = role_of(gm)
    if role.phase != "forward":
        return eager_compiler(gm, example_inputs)
    if role.tag and role.tag in COMPILED:
        extra = COMPILED[role.tag]
    else:
        MADE.append(role.tag)
        extra = 0.0 if example_inputs[0].shape[0] % 2 == 0 else 100.0  # a guard
        if role.tag:
            COMPILED[role.tag] = extra
    run = eager_compiler(gm, example_inputs)

    def call(args):
        first, *rest = run(args)
        return [first + extra, *rest]

    call._boxed_call = True
    return call


@pytest.fixture(autouse=True)
def careless():
    COMPILED.clear()
    MADE.clear()
    foregrad.register_backend(
        "careless", careless_compiler, eager_compiler, eager_compiler,
        cache_key=lambda: 1, prepare_joint=prepare, partition="default", replace=True,
    )  # fmt: skip


def in_a_new_process(sizes):
    """Compiled anew: what another process would do, but for what the compiler keeps."""
    compiled = foregrad.compile(lambda x: (x * 2).sum(), backend="careless", dynamic=True)
    return [compiled(torch.ones(size, requires_grad=True)).item() - 2 * size for size in sizes]


def test_conditions_come_back_with_the_graph():
    with fresh_cache() as folder:
        assert in_a_new_process([4, 6, 5, 8]) == [0, 0, 100, 0]
        assert len(MADE) == 2  # the graph for even sizes was not used for 5
        assert keys_in(folder, "sizes")
        assert in_a_new_process([4, 6, 5, 8]) == [0, 0, 100, 0]
        assert in_a_new_process([4, 5, 7]) == [0, 100, 100]
        assert len(MADE) == 2


def test_sizes_seen_first_are_in_the_key():
    with fresh_cache():
        assert in_a_new_process([4, 5]) == [0, 100]
        assert in_a_new_process([7, 4]) == [100, 0]
        assert in_a_new_process([7, 4, 9]) == [100, 0, 100]


def test_a_graph_whose_conditions_are_lost_is_not_found_again():
    with fresh_cache() as folder:
        in_a_new_process([4])
        for path in folder.glob("*.entry"):
            path.unlink()
        assert in_a_new_process([4, 5]) == [0, 100]
        assert len(MADE) == len(set(MADE)) == 3


def test_without_a_cache_nothing_may_be_kept():
    with foregrad.config.override(cache=False):
        assert in_a_new_process([4, 5]) == [0, 100]
    assert MADE == ["", ""]
