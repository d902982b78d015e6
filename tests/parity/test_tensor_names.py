"""Everything that there is on tensors may be asked of one inside of a captured function: see `tensor_names`."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.parity.tensor_names import KNOWN


@pytest.mark.parametrize("kind", ["argument", "result"])
def test_answers_are_eagers_or_refused_by_name(kind):
    """In a process of its own, which nothing that is asked may end."""
    run = forked.run("tests.parity.tensor_names", kind, FOREGRAD_CHECK="0")
    lines = run.stdout.splitlines()
    asked = [json.loads(line) for line in lines if line.startswith('"')]
    assert run.returncode in (0, 1), f"the process ended at {asked[-1:]}: {run.stderr[-2000:]}"
    assert len(asked) > (700 if kind == "argument" else 350)
    found = [line for line in lines[len(asked) + 1 :] if line.partition(": ")[0] not in KNOWN]
    assert not found
