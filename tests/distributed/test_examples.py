"""The examples of several processes run, each with what `torchrun` tells it, and learn."""

import os
import pathlib
import re
import socket

import pytest
import torch.distributed as dist

from tests import forked

_ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there"),
    pytest.mark.slow,
]


@pytest.mark.parametrize(("name", "said"), [("train_fsdp", "4 graphs"), ("train_tensor_parallel", "1 graph")])
def test_example(name, said, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    everywhere = {
        "FOREGRAD_CACHE_DIR": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    outputs = [tmp_path / f"rank {rank}" for rank in "01"]
    ranks = [
        forked.start(
            str(_ROOT / "examples" / f"{name}.py"),
            [],
            str(output),
            environment={**os.environ, **everywhere, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank, output in zip("01", outputs, strict=True)
    ]
    try:
        codes = [rank.wait(400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (output.read_text() for output in outputs)
    assert codes == [0, 0], first + second
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first)]
    assert losses[-1] < losses[0]
    assert any(line.endswith(said) for line in first.splitlines())  # a CUDA build says more as it ends
    assert "ForegradWarning" not in first + second
