"""`fully_shard` around compiled blocks: its hooks gather and free the parameters, the blocks train as eager's do."""

import pytest
import torch.distributed as dist

from . import ranks

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there")


_BEFORE = "blocks, then parallel | parallel, then blocks"


@pytest.mark.slow
def test_blocks_are_compiled_before_or_after_they_are_sharded(tmp_path):
    """Also with parameters that stay gathered, or in part; in another dtype; gradients reduced once in two backwards."""
    ranks.trains_as_eager(
        tmp_path,
        2,
        3,
        f"fsdp | {_BEFORE} | forwards, then parallel | parallel, then forwards",
        *(f"fsdp, {settings} | {_BEFORE}" for settings in ("kept", "half kept", "mixed", "accumulated")),
    )


@pytest.mark.slow
def test_through_torch_compile(tmp_path):
    sides = "dynamo: blocks | dynamo: parallel, then blocks | dynamo: whole"
    ranks.trains_as_eager(
        tmp_path, 2, 3, f"fsdp | {sides}", "fsdp, mixed | dynamo: blocks", "fsdp, accumulated | dynamo: blocks"
    )


def test_what_talks_to_other_processes_by_itself_runs_eagerly(tmp_path):
    codes, said = ranks.run("refused", 2, tmp_path)
    assert codes == [0, 0], "\n".join(said)
