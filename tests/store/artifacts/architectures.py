"""Small networks, one of each well-known architecture, with inputs to train each. No process that loads one imports this."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ARCHITECTURES"]


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.LayerNorm(64)
        )

    def forward(self, x, target):
        return F.mse_loss(self.layers(x), target)


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv_1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.way = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        return F.relu(self.norm_2(self.conv_2(y)) + self.way(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1))
        self.head = nn.Linear(64, 10)

    def forward(self, x, labels):
        logits = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down_1, self.down_2 = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 48, 3, padding=1)
        self.up = nn.ConvTranspose2d(48, 24, 2, stride=2)
        self.norm, self.out = nn.GroupNorm(4, 24), nn.Conv2d(48, 3, 3, padding=1)

    def forward(self, x):
        a = F.silu(self.norm(self.down_1(x)))
        b = F.silu(self.down_2(F.max_pool2d(a, 2)))
        return (self.out(torch.cat([a, self.up(b)], 1)) - x).square().mean()


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.recurrent = nn.Embedding(100, 48), nn.LSTM(48, 64, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        y, (h, c) = self.recurrent(self.words(tokens[:, :-1]))
        return F.cross_entropy(self.head(y).flatten(0, 1), tokens[:, 1:].flatten()) + 1e-3 * (h + c).square().mean()


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, w))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(100, 64), nn.Parameter(torch.randn(1, 32, 64) * 0.02)
        self.blocks = nn.ModuleList(Block(64, 4, causal=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens[:, :-1])
        x = x + self.places[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).transpose(1, 2), tokens[:, 1:])


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 64)), nn.Parameter(torch.randn(1, 17, 64) * 0.02)
        self.blocks = nn.Sequential(*(Block(64, 4, causal=False) for _ in range(2)))
        self.head = nn.Linear(64, 10)

    def forward(self, x, labels):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return F.cross_entropy(self.head(self.blocks(x)[:, 0]), labels)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(48, 96), nn.Linear(96, 10)
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 96)) for _ in range(2))
        self.norm = nn.LayerNorm(96)

    def forward(self, x, labels):
        x = self.embed(F.unfold(x, 4, stride=4).transpose(1, 2))
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norm(x))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 2 * 32), nn.Linear(32, 64)
        self.body = nn.Linear(64, 64)

    def forward(self, x):
        mean, log = self.encode(torch.tanh(self.body(x))).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return F.mse_loss(self.decode(z), x) - 0.01 * (1 + log - mean.square() - log.exp()).mean()


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(64, 64), nn.GRUCell(64, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, nodes, edges, target):
        for _ in range(3):
            a, b = nodes[edges[0]], nodes[edges[1]]
            sent = torch.zeros(nodes.shape[0], 64).index_add(0, edges[1], F.relu(self.message(torch.cat([a, b], -1))))
            nodes = self.update(sent, nodes)
        return F.mse_loss(self.head(nodes).mean(), target)


class ForceField(nn.Module):
    """Trained on energies and forces: the derivative is inside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        self.register_buffer("centers", torch.linspace(0.5, 4.0, 8))

    def energy(self, positions):
        steps = positions[:, None] - positions[None, :]
        distances = (steps.square().sum(-1) + torch.eye(positions.shape[0])).sqrt()
        return self.layers(torch.exp(-(distances[..., None] - self.centers).square())).sum()

    def forward(self, positions, energy, forces):
        positions = positions.detach().requires_grad_()
        found = self.energy(positions)
        (slope,) = torch.autograd.grad(found, positions, create_graph=True)
        return {"loss": (found - energy).square() + F.mse_loss(-slope, forces), "energy": found, "forces": -slope}


def randn(*shape):
    return lambda: torch.randn(shape)


def randint(high, *shape):
    return lambda: torch.randint(high, shape)


ARCHITECTURES = {
    "perceptron": (Perceptron, [randn(8, 64), randn(8, 64)]),
    "resnet": (ResNet, [randn(4, 3, 16, 16), randint(10, 4)]),
    "unet": (Unet, [randn(2, 3, 16, 16)]),
    "lstm": (Lstm, [randint(100, 4, 12)]),
    "gpt": (Gpt, [randint(100, 4, 17)]),
    "vision_transformer": (VisionTransformer, [randn(4, 3, 16, 16), randint(10, 4)]),
    "mixer": (Mixer, [randn(4, 3, 16, 16), randint(10, 4)]),
    "autoencoder": (Autoencoder, [randn(8, 64)]),
    "graph_network": (GraphNetwork, [randn(10, 32), randint(10, 2, 30), randn()]),
    "force_field": (ForceField, [randn(6, 3), randn(), randn(6, 3)]),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
        [randn(2, 9, 32)],
    ),
}
