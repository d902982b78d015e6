"""The memory foreseen for a rank is that of a rank that runs, by the allocator's reports."""

from __future__ import annotations

import re

import pytest
import torch

import foregrad
from foregrad.planning import fake_ranks
from tests.distributed.planned import inputs, net, optimizer_of, spread
from tests.distributed.ranks import run


@pytest.mark.parametrize(
    ("kind", "batch", "size"), [("fsdp", 16, 2), ("fsdp", 256, 2), ("dp", 256, 2), ("tp", 512, 2), ("both", 512, 4)]
)
def test_the_memory_of_a_rank(kind, batch, size, tmp_path):
    """With few values, the peak is that of gathers and reductions. The optimizer was made over the rank's own."""
    codes, said = run("planned", size, tmp_path, kind, str(batch))
    assert codes == [0] * size, "\n".join(said)
    state, measured = (int(re.search(rf"{name} (\d+)", said[0])[1]) for name in ("state", "peak"))
    with torch.device("meta"):
        model, call = net(), inputs(batch)
    with fake_ranks(size, 0):
        model = spread(model, kind, size)
        plans = [
            foregrad.plan(one, *call, optimizer=optimizer_of(model), device="cpu")
            for one in (model, lambda *args: model(*args))
        ]
    if kind in ("fsdp", "dp"):
        with torch.device("meta"):
            whole = net()
        plans.append(foregrad.plan(whole, *call, optimizer=optimizer_of(whole), device="cpu", mesh={kind: size}))
    for found in plans:
        assert (found.optimizer.state, found.trained) == (state, plans[0].trained)
        # At 16 rows gathers dominate, and eager's row counts whole gradients beside the buffers of their reduction.
        for choice in ("save all", "eager")[: 1 if kind == "dp" else 2]:
            assert found.choice(choice).peak - found.standing.total == pytest.approx(
                measured, rel=0.03 if kind == "dp" else 0.005 if choice == "eager" else 0.001
            )
