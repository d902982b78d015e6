"""A rank that trains a model by `fully_shard`, DTensor, both, or `DistributedDataParallel`, with an optimizer of two
groups. It says the bytes of the optimizer's state and the peak of a step's memory.

python -m tests.distributed.planned rank size store kind batch
"""

from __future__ import annotations

import gc
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import joined
from tests.parity.peak import peak_of
from tests.planning.networks import Net


def net() -> Net:
    return Net(layers=6, width=256)


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 256), torch.randint(0, 10, (batch,))


def spread(model: Net, kind: str, size: int) -> nn.Module:
    """The model on its ranks: of both, half of the ranks split operators."""
    if kind == "dp":
        return DistributedDataParallel(model, init_sync=False)
    mesh = init_device_mesh(
        "cpu", (2, size // 2) if kind == "both" else (size,), mesh_dim_names=("0", "1")[: 1 + (kind == "both")]
    )
    whole, parts = (mesh["0"], mesh["1"]) if kind == "both" else (mesh, mesh)
    for layer in model.layers:
        if kind != "fsdp":
            parallelize_module(layer, parts, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if kind != "tp":
            fully_shard(layer, mesh=whole)
    if kind != "tp":
        fully_shard(model, mesh=whole)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    inner = getattr(model, "module", model)
    groups = [{"params": [*inner.layers.parameters()], "amsgrad": True}, {"params": [*inner.head.parameters()]}]
    return torch.optim.AdamW(groups, lr=1e-3)


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank, but for the counts of steps."""
    found = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
    return sum(getattr(one, "_local_tensor", one).nbytes for one in found)


def main(kind: str, batch: int) -> None:
    model = spread(net(), kind, torch.distributed.get_world_size())
    optimizer = optimizer_of(model)
    x, labels = inputs(batch)

    def step() -> None:
        model(x, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    # A thread of gloo's may let a buffer go late, which is no matter of the step.
    print(f"state {state_of(optimizer)}", flush=True)
    rounds = 3 if kind in ("tp", "both") else 20
    print(f"peak {min(peak_of(step) for _ in range(rounds))}", flush=True)


if __name__ == "__main__":
    with joined(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]):
        main(sys.argv[4], int(sys.argv[5]))
