"""Tensor parallel: each process computes its part of each layer, in one graph with the collectives between the parts.

    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py

The processes talk by gloo on the CPU, and by NCCL where there is a GPU for each.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812

import foregrad


class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.narrow(F.gelu(self.wide(self.norm(x)))).relu())


def main(steps=60):
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)  # the same parameters, and the same data, everywhere
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    model = Classifier().to(device)
    parallelize_module(model, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    compiled = foregrad.compile(model)

    graph = foregrad.capture(model, torch.randn(32, 8, device=device))
    lines = [line.strip() for line in str(graph).splitlines() if "_c10d_functional.all_reduce" in line]
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(32, 8, device=device)
        loss = F.cross_entropy(compiled(x), (x[:, 0] * x[:, 1] > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"{len(foregrad.explain_recompiles(compiled).entries)} graph", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
