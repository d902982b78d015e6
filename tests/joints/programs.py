"""Modules, each with what is special about it as a joint graph."""

from __future__ import annotations

import torch
from torch import nn


def whole_regions():
    """Dynamo leaves a nested compile region as an operator, though it is used once; since 2.12 a setting says so."""
    name = "inline_single_use_invoke_subgraph"
    return torch._dynamo.config.patch({name: False} if hasattr(torch._dynamo.config, name) else {})


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())


class Norm(nn.Module):
    """Writes to buffers, and has a parameter that it does not use."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return self.norm(self.linear(x))


class Nested(nn.Module):
    """Nested arguments and results, with plain values among both."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch, times, *, scale=None):
        out = self.linear(batch["x"]) * times
        return {"out": out, "times": times, "none": None, "scaled": (out * scale, batch["y"] + 1)}


class Views(nn.Module):
    """Results that are views of an input, of each other, and an input itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        out = self.linear(x)
        return out, out[0], x.view(-1), x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Written(nn.Module):
    """Writes to an argument whose history goes on."""

    def forward(self, x, y):
        y.mul_(2)
        return x * y


class Reached(nn.Module):
    """Reads a tensor that it does not hold."""

    def forward(self, x):
        return (x * TABLE).sum(0)


TABLE = torch.arange(4.0)


LEAVES = []  # behind the arguments, in the last call


def arguments_of(name):
    torch.manual_seed(1)
    LEAVES[:] = [torch.randn(5, 4, requires_grad=True)]
    x = torch.randn(5, 4)
    return {
        "Plain": ((x,), {}),
        "Norm": ((x,), {}),
        "Nested": (({"x": x, "y": torch.ones(2)}, 3), {"scale": torch.full((), 2.0)}),
        "Views": ((x,), {}),
        "Tied": ((torch.tensor([[1, 2, 3], [0, 1, 5]]),), {}),
        "Written": ((x.requires_grad_(), LEAVES[0] * 1), {}),
        "Reached": ((x.requires_grad_(),), {}),
    }[name]


MODULES = {cls.__name__: cls for cls in (Plain, Norm, Nested, Views, Tied, Written, Reached)}


def made(name):
    torch.manual_seed(0)
    return MODULES[name]()


def held_by(module):
    """What the compiled function takes first."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return [*parameters.values(), *buffers.values()]


def observed(module, name, call):
    """Results, gradients and buffers of one step; `call` gets the module and its arguments."""
    args, kwargs = arguments_of(name)
    out = call(module, args, kwargs)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    losses = [leaf.square().sum() for leaf in leaves if leaf.requires_grad]
    given = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    sum(losses).backward()
    leaves = [*module.parameters(), *LEAVES, *(leaf for leaf in given if leaf.is_leaf)]
    return out, [leaf.grad for leaf in leaves], given, [*module.buffers()]
