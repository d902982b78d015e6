"""A rank that trains a model by `fully_shard` or `DistributedDataParallel`, and says the peak of a step's memory.

python -m tests.distributed.planned rank size store kind batch
"""

from __future__ import annotations

import gc
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import joined
from tests.parity.peak import peak_of
from tests.planning.networks import Net


def net() -> Net:
    return Net(layers=6, width=256)


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 256), torch.randint(0, 10, (batch,))


def main(kind: str, batch: int) -> None:
    model: nn.Module = net()
    if kind == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, labels = inputs(batch)

    def step() -> None:
        model(x, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    # A thread of gloo's may let a buffer go late, which is no matter of the step.
    print(f"peak {min(peak_of(step) for _ in range(20))}", flush=True)


if __name__ == "__main__":
    with joined(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]):
        main(sys.argv[4], int(sys.argv[5]))
