"""What an allocator reserves for a step is replayed from its allocations."""

from __future__ import annotations

import pytest

import foregrad
from foregrad.errors import PlanError
from tests.covering import each
from tests.planning.test_plan import absent

MIB = 1 << 20


@pytest.mark.parametrize(
    ("choice", "mesh", "batch"),
    each(["save all", "min cut", "checkpoint each layer", "full checkpointing"], [None, {"dp": 4}], [1, 4096], times=2),
)
def test_the_blocks_of_the_allocations_are_the_peak(batch, choice, mesh):
    """The plan counts bytes by sums over the timeline; the replay takes and gives back each memory."""
    model, x, labels = absent(batch)
    plan = foregrad.plan(model, x, labels, optimizer="AdamW", device="h100", mesh=mesh)
    found = plan.reserved(choice)
    rounding = 512 * 2000  # at most half of it a memory, and those of single numbers
    assert plan.choice(choice).peak <= found.allocated <= plan.choice(choice).peak + rounding
    assert found.allocated <= found.reserved == sum(found.by_stream.values())


def test_shards_and_gathers_are_reserved_for_streams_of_their_own():
    model, x, labels = absent(4096)
    plan = foregrad.plan(model, x, labels, optimizer="AdamW", device="h100", mesh={"fsdp": 4})
    found = plan.reserved("save all")
    assert set(found.by_stream) == {0, 1, 2}
    assert plan.choice("save all").peak == pytest.approx(found.allocated, rel=0.01)
    shards = plan.choice("save all").memory.gradients
    assert shards <= found.by_stream[2] <= shards + 25 * MIB


def test_a_second_step_reserves_what_the_first_left_no_room_for():
    model, x, labels = absent(4096)
    none = foregrad.plan(model, x, labels, device="h100").reserved("save all")
    adam = foregrad.plan(model, x, labels, optimizer="AdamW", device="h100").reserved("save all")
    assert adam.reserved > none.reserved


def test_an_expandable_segment_holds_little_that_is_not_used():
    model, x, labels = absent(65536)
    plan = foregrad.plan(model, x, labels, optimizer="AdamW", device="h100")
    found = plan.reserved("save all", expandable=True)
    assert found.allocated <= found.reserved <= 1.1 * found.allocated


def test_a_choice_that_does_not_exist_has_no_reserve():
    model, x, labels = absent()
    plan = foregrad.plan(model, x, labels, optimizer="AdamW", device={"like": "h100", "memory": 1000})
    with pytest.raises(PlanError, match="no choice fits"):
        plan.reserved()
    with pytest.raises(PlanError, match="there is no 'budget': does not fit"):
        plan.reserved("budget")
    with pytest.raises(KeyError, match="there is no choice 'none'"):
        plan.reserved("none")
