"""`foregrad.compile(DistributedDataParallel(m))` and the other way round train as eager does, in one and two processes."""

import subprocess
import sys

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there")


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_averaged(size, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.dynamo.ddp_programs"]
    processes = [
        subprocess.Popen([*command, str(rank), str(size), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(said)
