"""FSDP2 with compiled blocks: each process keeps a part of the parameters, and gathers those of a block when it runs.

    torchrun --nproc-per-node 2 examples/train_fsdp.py

The processes talk by gloo on the CPU, and by NCCL where there is a GPU for each.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

import foregrad

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 64, 4, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.attention(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.hidden(self.norm_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def main(steps=40):
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)  # the same parameters everywhere
    model = Model().to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for index, block in enumerate(model.blocks):
        model.blocks[index] = foregrad.compile(block)
        fully_shard(model.blocks[index], mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(dist.get_rank())  # other data everywhere
    for step in range(steps):
        start = torch.randint(VOCABULARY, (16, 1), device=device)
        text = (start + 7 * torch.arange(LENGTH + 1, device=device)) % VOCABULARY  # each word follows from the last
        loss = F.cross_entropy(model(text[:, :-1]), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)

    own = sum(p.to_local().numel() for p in model.parameters())
    graphs = sum(len(foregrad.explain_recompiles(block).entries) for block in model.blocks)
    if dist.get_rank() == 0:
        print(f"{own} of {sum(p.numel() for p in model.parameters())} parameters are here; {graphs} graphs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
