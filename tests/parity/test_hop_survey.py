"""PyTorch's samples of higher-order operators through both doors: see `hop_survey`."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("door", ["direct", "dynamo"])
def test_every_sample_with_gradients_is_eagers_or_refused(door):
    command = [sys.executable, "-m", "tests.parity.hop_survey", "--op", "^(?!program ).* grad$", "--door", door]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(", 0 WRONG, ERROR or CRASH")
    assert "equal" in done.stdout
