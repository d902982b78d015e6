"""The network that tests of planning share: residual layers, and a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A residual layer with a norm."""

    def __init__(self, width: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers and a loss."""

    def __init__(self, layers: int = 4, width: int = 64, activation: Activation = functional.gelu) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, activation) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).float(), labels)
