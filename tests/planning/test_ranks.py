"""The memory foreseen for a rank is that of a rank that runs, by the allocator's reports."""

from __future__ import annotations

import re

import pytest

import foregrad
from tests.distributed.planned import inputs, net
from tests.distributed.ranks import run


@pytest.mark.parametrize(("kind", "batch"), [("fsdp", 16), ("fsdp", 2048), ("dp", 2048)])
def test_the_peak_of_a_rank(kind, batch, tmp_path):
    """With few values, the peak is that of gathers and reductions."""
    codes, said = run("planned", 2, tmp_path, kind, str(batch))
    assert codes == [0, 0], "\n".join(said)
    measured = int(re.search(r"peak (\d+)", said[0])[1])
    found = foregrad.plan(net(), *inputs(batch), optimizer="AdamW", device="cpu", mesh={kind: 2})
    assert found.choice("save all").peak - found.standing.total == pytest.approx(
        measured, rel=0.03 if kind == "dp" else 0.001
    )
