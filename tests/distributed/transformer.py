"""A small transformer, written so that PyTorch's tensor parallelism can share out its heads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["LENGTH", "VOCABULARY", "Block", "Transformer"]

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 16, 4, 2, 32, 8


class Block(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.size = width // heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.out(self.attend(self.norm(x)))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def attend(self, x):
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.query(x), self.key(x), self.value(x))
        )
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Transformer(nn.Module):
    def __init__(self, width=WIDTH, layers=LAYERS, length=LENGTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
