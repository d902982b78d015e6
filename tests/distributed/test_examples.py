"""The examples of several processes run under torchrun, and learn."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

_ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="gloo is not there"),
    pytest.mark.slow,
]


@pytest.mark.parametrize(("name", "said"), [("train_fsdp", "4 graphs"), ("train_tensor_parallel", "1 graph")])
def test_example(name, said, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FOREGRAD_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [*command, f"examples/{name}.py"],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert done.stdout.rstrip().endswith(said)
    assert "ForegradWarning" not in done.stderr
