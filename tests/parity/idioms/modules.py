"""Modules: state, tied weights, normalisations, parametrizations."""

from __future__ import annotations

import torch
from torch import nn

from tests.parity.idioms.common import PROGRAMS, leaf, plain


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.b(x)


class BatchNormEval(BatchNorm):
    def __init__(self):
        super().__init__()
        self.eval()


PROGRAMS["batch_norm"] = (BatchNorm(), lambda: (plain(4, 3, 5, 5),), {})


PROGRAMS["batch_norm_eval"] = (BatchNormEval(), lambda: (leaf(4, 3, 5, 5),), {})


class TwiceBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.b(self.b(x)).sum()


PROGRAMS["one_batch_norm_twice"] = (TwiceBatchNorm(), lambda: (plain(4, 3),), {})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.c = nn.Linear(3, 3)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.a(x).relu())


PROGRAMS["tied_weights"] = (Tied(), lambda: (plain(4, 3),), {})


class UnusedParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.c = nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x)


PROGRAMS["an_unused_parameter"] = (UnusedParameter(), lambda: (plain(4, 3),), {})


class CountingBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.n.add_(1)
        self.n.mul_(2)
        return x * self.w * self.n


PROGRAMS["a_buffer_written_twice"] = (CountingBuffer(), lambda: (plain(3),), {})


class ViewedBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(4))
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.n.view(2, 2)[0].copy_(x[:2].detach())
        return (x * self.w + self.n, self.n)


PROGRAMS["a_buffer_written_through_a_view_and_returned"] = (ViewedBuffer(), lambda: (plain(4),), {})


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.l(x)[0]


PROGRAMS["a_recurrent_layer"] = (Recurrent(), lambda: (leaf(2, 5, 3),), {})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.l(x, x, x)


PROGRAMS["attention_module"] = (Attention(), lambda: (leaf(2, 5, 8),), {})


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.LayerNorm(8)
        self.g = nn.GroupNorm(5, 5)
        self.w = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.w(self.g(self.l(x)))


PROGRAMS["normalisations"] = (Normalised(), lambda: (leaf(2, 5, 8),), {})


class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.w(x)


PROGRAMS["spectral_norm"] = (SpectralNorm(), lambda: (leaf(2, 8),), {})


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4, 4)
        self.t = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for a, b in zip(self.t.parameters(), self.w.parameters(), strict=True):
                a.lerp_(b, 0.1)
        return self.w(x) - self.t(x)


PROGRAMS["averaged_weights"] = (Averaged(), lambda: (leaf(2, 4),), {})
