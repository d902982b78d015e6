"""Twenty steps of a small transformer on two ranks, and on four where `FOREGRAD_FOUR_RANKS` is set: bit for bit eager's."""

import os

import pytest
import torch.distributed as dist

from . import ranks

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there"),
    pytest.mark.slow,
]

FOUR = pytest.param(
    4, marks=pytest.mark.skipif(not os.environ.get("FOREGRAD_FOUR_RANKS"), reason="FOREGRAD_FOUR_RANKS is not set")
)


@pytest.mark.parametrize("size", [2, FOUR])
def test_twenty_steps(size, tmp_path):
    """Buckets of DDP are laid out as gradients arrive, and more than two ranks add up by place."""
    ddp = "ddp | blocks, then parallel | whole, then parallel"
    programs = ["tensor | parallel, then whole", ddp, "fsdp | parallel, then blocks"]
    if size == 4:
        programs += ["fsdp and tensor | blocks, then parallel | parallel, then blocks | dynamo: blocks"]
    ranks.trains_as_eager(tmp_path, size, 20, *programs, seconds=500)


def test_ways_to_compile(tmp_path):
    before, after = "blocks, then parallel", "parallel, then blocks"
    ranks.trains_as_eager(
        tmp_path,
        2,
        3,
        f"tensor | {before} | {after} | whole, then parallel | parallel, then forwards",
        f"sequence | {before} | {after} | parallel, then whole",
        "vocabulary | parallel, then whole",
        "tied | parallel, then whole",
        f"ddp | {before} | whole, then parallel | parallel, then whole",
        f"ddp, accumulated | {before} | parallel, then whole",
        f"ddp, unused | {before} | parallel, then whole",
        f"ddp, static | {before} | parallel, then whole",
    )


def test_through_torch_compile(tmp_path):
    ranks.trains_as_eager(
        tmp_path,
        2,
        3,
        "tensor | dynamo: blocks | dynamo: whole",
        "sequence | dynamo: blocks",
        "vocabulary | dynamo: whole",
        "ddp | dynamo: blocks | dynamo: whole",
        "ddp, accumulated | dynamo: whole",
        "ddp, unused | dynamo: whole",
        "ddp, static | dynamo: whole",
    )


def test_collectives_are_nodes_of_graphs_and_partitions_repeat_none(tmp_path):
    codes, said = ranks.run("collectives", 2, tmp_path)
    assert codes == [0, 0], "\n".join(said)


@pytest.mark.parametrize("parallel", ["tensor", "fsdp", "ddp"])
def test_a_rank_that_is_killed(parallel, tmp_path):
    """The other one gets the error that it gets in eager, within the timeout."""
    codes, said = ranks.run("killed", 2, tmp_path, parallel, seconds=60)
    assert codes == [0, 9], "\n".join(said)
