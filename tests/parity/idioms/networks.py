"""More modules: state that is written, weights used twice, recurrence, hooks; and what a step of training does besides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.idioms.common import PROGRAMS, leaf


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class TwoNorms(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.norm(x) * 2)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.ModuleList([nn.Conv1d(2, 2, 3, padding=1) for _ in range(2)])
        self.norm = nn.GroupNorm(1, 2)

    def forward(self, x):
        for convolution in self.convolutions:
            x = x + F.gelu(self.norm(convolution(x)))
        return x


class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.mul_(0.9).add_(online, alpha=0.1)
        return F.mse_loss(self.online(x), self.target(x).detach())


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("cache", torch.zeros(2, 3))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        y = self.linear(x)
        self.cache[0] = y.detach().mean(0)
        self.steps += 1
        return y * self.cache.sum() / self.steps


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.gru = nn.LSTM(3, 4, 2, batch_first=True), nn.GRUCell(4, 3)

    def forward(self, x):
        out, (h, c) = self.lstm(x)
        state = torch.zeros(x.shape[0], 3)
        for step in range(x.shape[1]):
            state = self.gru(out[:, step], state)
        return state, h, c


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.linear.register_forward_hook(lambda module, inputs, output: output * 2)
        self.linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))

    def forward(self, x):
        return self.linear(x)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x):
        return self.linear(x)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(3, 2), nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return torch.einsum("bi,eij,be->bj", x, self.experts, weights)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        out, weights = self.attention(x, x, x)
        return out, weights


for name, module, arguments in [
    ("an_embedding_tied_to_the_head", Tied, lambda: (torch.tensor([[0, 3, 6]]),)),
    ("one_norm_twice", TwoNorms, lambda: (leaf(4, 3),)),
    ("residual_convolutions", Residual, lambda: (leaf(1, 2, 5),)),
    ("a_momentum_encoder", Momentum, lambda: (leaf(2, 3),)),
    ("buffers_written_by_row", Cached, lambda: (leaf(2, 3),)),
    ("recurrence", Recurrent, lambda: (leaf(2, 3, 3),)),
    ("hooks_of_modules", Hooked, lambda: (leaf(2, 3),)),
    ("a_parametrization", Normalized, lambda: (leaf(2, 3),)),
    ("frozen_parameters", Frozen, lambda: (leaf(2, 3),)),
    ("experts", Experts, lambda: (leaf(2, 3),)),
    ("attention_and_its_weights", Attention, lambda: (leaf(1, 3, 4),)),
]:
    PROGRAMS[name] = (module(), arguments, {})
