"""A compiler that keeps compiled graphs finds one only together with what it found out about sizes while compiling."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.backends.eager import eager_compiler
from foregrad.graph.role import role_of
from tests.store.cache.kept import fresh_cache, keys_in, prepare

COMPILED = {}  # what the compiler keeps "on disk", by the tag that it was given
MADE = []
ASKED = []


def careless_compiler(gm, example_inputs):
    """Makes one program for even first sizes and one for odd ones, and asks no more once it has kept it."""
    role = role_of(gm)
    if role.phase != "forward":
        return eager_compiler(gm, example_inputs)
    if role.tag and role.tag in COMPILED:
        extra = COMPILED[role.tag]
    else:
        MADE.append(role.tag)
        size = example_inputs[0].shape[0]
        extra = 0.0 if size % 2 == 0 else 100.0  # a guard
        extra += sum(1.0 if size % divisor != 0 else 0.0 for divisor in ASKED)
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
    ASKED.clear()
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


def test_another_size_comes_first_in_the_second_process():
    with fresh_cache() as folder:
        assert in_a_new_process([4, 5]) == [0, 100]
        assert len(MADE) == 2
        for first in range(2, 12):
            assert in_a_new_process([first]) == [0 if first % 2 == 0 else 100]
        assert in_a_new_process([7, 4, 9, 6]) == [100, 0, 100, 0]
        assert len(MADE) == 2
        assert len(keys_in(folder, "sizes")) == 2


def test_a_graph_that_the_compiler_lost_is_made_anew_under_a_tag_of_its_own():
    """The one for even sizes asks no more than it has been told; the other one would have to."""
    with fresh_cache():
        in_a_new_process([4])
        first = set(MADE)
        COMPILED.clear()
        ASKED.append(8)  # from now on, whether sizes can be divided by 8 is a condition too
        assert in_a_new_process([16, 4, 24, 12]) == [0, 1, 0, 1]
        assert first.isdisjoint(COMPILED)
        count = len(MADE)
        assert in_a_new_process([4, 16]) == [1, 0]
        assert in_a_new_process([12, 8]) == [1, 0]
        assert len(MADE) == count


def test_more_conditions_than_entries():
    """A graph for each remainder: some are made anew, none is taken for another."""
    ASKED[:] = [16, 8, 4]
    with fresh_cache():
        expected = [sum(n % d != 0 for d in ASKED) + 100 * (n % 2) for n in range(2, 40)]
        for _ in range(2):
            assert [in_a_new_process([n])[0] for n in range(2, 40)] == expected


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
