"""More than forty small functions of float64 leaves, smooth where they are evaluated, for derivatives of any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def leaf(*shape: int, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    return (torch.rand(*shape, dtype=torch.float64) * (high - low) + low).requires_grad_()


class Cube(torch.autograd.Function):
    """x^3 with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def written(x, y):
    z = x.sin() * y
    z.mul_(y.exp())
    z[0] = x[1] * y[1]
    return z.sum()


def inner_gradient(x, w):
    energy = torch.tanh(x @ w).pow(2).sum()
    return -torch.autograd.grad(energy, x, create_graph=True)[0]


def inner_twice(x):
    first = torch.autograd.grad((x**4).sin().sum(), x, create_graph=True)[0]
    return torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)[0]


def attention(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


def lstm_cell(x, h, w):
    i, f, g, o = (torch.cat((x, h), -1) @ w).chunk(4, -1)
    return o.sigmoid() * torch.tanh(f.sigmoid() * h + i.sigmoid() * g.tanh())


def looped(x, w):
    for _ in range(3):
        x = torch.tanh(x @ w) + x
    return x


def norm_of(x):
    return x.norm(dim=-1) * torch.linalg.vector_norm(x, 3)


M = torch.arange(6) % 3

TABLE: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "polynomial": (lambda x: x**4 - 2 * x**3 + x, lambda: (leaf(3),)),
    "product": (lambda x, y: x * y * x, lambda: (leaf(3), leaf(3))),
    "quotient": (lambda x, y: x / y, lambda: (leaf(3), leaf(3, low=1, high=2))),
    "power": (lambda x, y: x**y, lambda: (leaf(3, low=1, high=2), leaf(3, low=1, high=2))),
    "exp sin": (lambda x: x.exp() * x.sin(), lambda: (leaf(3),)),
    "log": (lambda x: (x * x).log(), lambda: (leaf(3, low=1, high=2),)),
    "sqrt": (lambda x: x.sqrt().rsqrt(), lambda: (leaf(3, low=1, high=2),)),
    "tanh": (lambda x: torch.tanh(x).exp(), lambda: (leaf(3),)),
    "sigmoid": (lambda x: torch.sigmoid(x) * x, lambda: (leaf(3),)),
    "softplus": (lambda x: F.softplus(x).pow(2), lambda: (leaf(3),)),
    "gelu": (F.gelu, lambda: (leaf(3),)),
    "silu": (lambda x: F.silu(x * 2), lambda: (leaf(3),)),
    "erf": (lambda x: torch.erf(x) * x.cosh(), lambda: (leaf(3),)),
    "atan2": (torch.atan2, lambda: (leaf(3, low=1, high=2), leaf(3, low=1, high=2))),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda: (leaf(2, 3),)),
    "softmax": (lambda x: torch.softmax(x, -1) * x, lambda: (leaf(2, 3),)),
    "log softmax": (lambda x: torch.log_softmax(x, -1).pow(2), lambda: (leaf(2, 3),)),
    "norms": (norm_of, lambda: (leaf(2, 3, low=0.5),)),
    "variance": (lambda x: x.var(-1) + x.std(), lambda: (leaf(2, 3),)),
    "cumprod": (lambda x: x.cumprod(-1), lambda: (leaf(2, 3, low=0.5),)),
    "matmul": (lambda x, w: (x @ w).pow(2), lambda: (leaf(2, 3), leaf(3, 2))),
    "linear": (lambda x, w, b: torch.tanh(F.linear(x, w, b)), lambda: (leaf(2, 3), leaf(2, 3), leaf(2))),
    "bilinear": (lambda x, a: torch.einsum("i,ij,j->", x, a, x).sin(), lambda: (leaf(3), leaf(3, 3))),
    "conv": (lambda x, w: torch.tanh(F.conv1d(x, w)), lambda: (leaf(1, 2, 5), leaf(2, 2, 3))),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b).exp(), lambda: (leaf(2, 3), leaf(3), leaf(3))),
    "group norm": (lambda x, w: F.group_norm(x, 2, w).sin(), lambda: (leaf(2, 4, 3), leaf(4))),
    "batch norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True).sin(), lambda: (leaf(4, 3), leaf(3))),
    "rms norm": (lambda x, w: F.rms_norm(x, (3,), w).sin(), lambda: (leaf(2, 3), leaf(3))),
    "cosine similarity": (lambda x, y: F.cosine_similarity(x, y), lambda: (leaf(2, 3), leaf(2, 3))),
    "spectrum": (lambda x: torch.fft.rfft(x).abs().pow(2).log1p(), lambda: (leaf(5),)),
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.tril() + 2 * torch.eye(3, dtype=a.dtype), b, upper=False),
        lambda: (leaf(3, 3), leaf(3, 2)),
    ),
    "attention": (attention, lambda: (leaf(2, 3), leaf(2, 3), leaf(2, 3))),
    "lstm cell": (lstm_cell, lambda: (leaf(2, 2), leaf(2, 2), leaf(4, 8))),
    "loop": (looped, lambda: (leaf(2, 2), leaf(2, 2))),
    "solve": (
        lambda a, b: torch.linalg.solve(a @ a.mT + torch.eye(3, dtype=a.dtype), b),
        lambda: (leaf(3, 3), leaf(3)),
    ),
    "determinant": (lambda a: torch.linalg.det(a @ a.mT + torch.eye(2, dtype=a.dtype)), lambda: (leaf(2, 2),)),
    "inverse": (lambda a: torch.linalg.inv(a @ a.mT + torch.eye(2, dtype=a.dtype)), lambda: (leaf(2, 2),)),
    "gather scatter": (lambda x: torch.zeros(3, dtype=x.dtype).index_add(0, M, x[M] ** 3), lambda: (leaf(6),)),
    "views": (lambda x: (x.t()[1:].reshape(-1) * x.view(-1)[:4]).unfold(0, 2, 1).sin(), lambda: (leaf(2, 3),)),
    "where clamp": (lambda x: torch.where(x > 0, x**3, x.sin()).clamp(max=5), lambda: (leaf(5, low=0.1),)),
    "written in place": (written, lambda: (leaf(3), leaf(3))),
    "custom function": (lambda x: Cube.apply(x.sin()) * x, lambda: (leaf(3),)),
    "detached part": (lambda x: x * x * x.detach().exp(), lambda: (leaf(3),)),
    "inner gradient": (inner_gradient, lambda: (leaf(2, 3), leaf(3, 2))),
    "inner gradients": (inner_twice, lambda: (leaf(2),)),
    "checkpointed": (
        lambda x, w: checkpoint(looped, x, w, use_reentrant=False).exp(),
        lambda: (leaf(2, 2), leaf(2, 2)),
    ),
}
