"""Everything that there is on tensors may be asked of one inside of a captured function: see `tensor_names`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.parity.tensor_names import KNOWN


@pytest.mark.parametrize("kind", ["argument", "result"])
def test_answers_are_eagers_or_refused_by_name(kind):
    """In a process of its own, which nothing that is asked may end."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.parity.tensor_names", kind]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FOREGRAD_CHECK": "0"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = run.stdout.splitlines()
    asked = [json.loads(line) for line in lines if line.startswith('"')]
    assert run.returncode in (0, 1), f"the process ended at {asked[-1:]}: {run.stderr[-2000:]}"
    assert len(asked) > 700
    found = [line for line in lines[len(asked) + 1 :] if line.partition(": ")[0] not in KNOWN]
    assert not found
