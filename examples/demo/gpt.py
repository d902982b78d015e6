"""The demo's model: a small GPT over bytes, in plain PyTorch. Nothing in this file knows of foregrad.

It holds what makes a training step hard to compile faithfully: dropout (random numbers), one weight used in two
places (the embedding is also the output layer), a buffer, and views of one projection as queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that every PyTorch program uses

__all__ = ["GPT", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """The model's sizes. The defaults train a step in some tens of milliseconds on two CPU cores."""

    vocabulary: int = 256
    context: int = 64
    layers: int = 3
    heads: int = 4
    width: int = 128
    dropout: float = 0.1


class CausalSelfAttention(nn.Module):
    """Several heads of attention; each position sees itself and what came before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.project_in = nn.Linear(config.width, 3 * config.width)
        self.project_out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.project_in(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return F.dropout(self.project_out(mixed.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        return x  # noqa: RET504  a module's call has no type, the name has


class GPT(nn.Module):
    """Predicts each next byte; called with the bytes and those that follow them, it returns the mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.positions: Tensor
        self.register_buffer("positions", torch.arange(config.context), persistent=False)
        self.apply(_initialise)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.dropout(self.token(tokens) + self.position(self.positions[:length]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    """Small random weights and no biases, so that training starts from a near-uniform guess."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
