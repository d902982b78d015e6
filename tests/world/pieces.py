"""What programs of this folder are made of."""

import torch
from torch import nn


def numbers(*values, g=False):
    return torch.tensor(values, dtype=torch.float32, requires_grad=g)


def mlp(n=4, h=6, o=3):
    return nn.Sequential(nn.Linear(n, h), nn.Tanh(), nn.Linear(h, o))


def batches(count=3, size=5, n=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    pairs = range(count)
    return [
        (torch.randn(size, n, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for _ in pairs
    ]


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]
