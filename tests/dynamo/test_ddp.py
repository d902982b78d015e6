"""`foregrad.compile(DistributedDataParallel(m))` and the other way round train as eager does, in one and two processes."""

import pytest
import torch.distributed as dist

from tests import forked

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there")


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_averaged(size, tmp_path):
    outputs = [tmp_path / f"output {rank}" for rank in range(size)]
    ranks = [
        forked.start("tests.dynamo.ddp_programs", [str(rank), str(size), str(tmp_path / "store")], str(output))
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [rank.wait(400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * size, "\n".join(output.read_text() for output in outputs)
