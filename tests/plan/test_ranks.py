"""The memory foreseen for a rank is that of a rank that runs, by the allocator's reports."""

from __future__ import annotations

import re

import pytest

import foregrad
from tests.distributed.planned import Net, inputs
from tests.distributed.ranks import run


@pytest.mark.parametrize("kind", ["fsdp", "dp"])
def test_the_peak_of_a_rank(kind, tmp_path):
    batch = 2048  # values outweigh the buffers of collectives, which on the CPU go when a thread of gloo's lets them
    codes, said = run("planned", 2, tmp_path, kind, str(batch))
    assert codes == [0, 0], "\n".join(said)
    measured = int(re.search(r"peak (\d+)", said[0])[1])
    found = foregrad.plan(Net(), *inputs(batch), optimizer="AdamW", device="cpu", mesh={kind: 2})
    assert found.choice("save all").peak - found.standing.total == pytest.approx(measured, rel=0.03)
