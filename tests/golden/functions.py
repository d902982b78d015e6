"""Forty ordinary functions whose rendered runtime is kept as text: what people compile every day.

Each entry of `FUNCTIONS` gives a function (or module) and its arguments, made anew for each test.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["FUNCTIONS"]

FUNCTIONS = {}


def ordinary(*args):
    """Register a function with what makes each of its arguments."""

    def register(f):
        FUNCTIONS[f.__name__] = lambda: (f, tuple(make() for make in args))
        return f

    return register


def leaf(*shape):
    return lambda: torch.ones(shape, requires_grad=True)


def interior(*shape):
    return lambda: torch.ones(shape, requires_grad=True) * 2


def plain(*shape):
    return lambda: torch.ones(shape)


# ---------------------------------------------------------------- values


@ordinary(leaf(3))
def one_output(x):
    return x.sin()


@ordinary(leaf(3), leaf(3))
def two_outputs(x, y):
    return x * y, x + y


@ordinary(plain(3), plain(3))
def no_gradients(x, y):
    return x * y


@ordinary(leaf(3), plain(3))
def loss(x, target):
    return (x - target).square().mean()


@ordinary(leaf(3))
def output_without_gradient(x):
    return x * 2, x.detach() + 1


@ordinary(leaf(3), lambda: 2.5, lambda: "text", lambda: None)
def numbers_and_text(x, scale, text, nothing):
    return x * scale, text, nothing, 3


@ordinary(lambda: {"a": torch.ones(3, requires_grad=True), "b": [torch.ones(3), (torch.ones(3), 2)]})
def containers(batch):
    return {"out": batch["a"] * batch["b"][0], "rest": [batch["b"][1][0] + 1, (None,)]}


@ordinary(leaf(3))
def inside_no_grad(x):
    with torch.no_grad():
        scale = x.abs().max()
    return x / scale


@ordinary(leaf(4, 4))
def mixed_precision(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


@ordinary(leaf(3, 3))
def random_numbers(x):
    return F.dropout(x, 0.5) + torch.rand_like(x)


@ordinary(lambda: torch.tensor([0, 2]), leaf(4, 3))
def embedding(ids, weight):
    return F.embedding(ids, weight)


@ordinary(leaf(3, 4))
def values_and_indices(x):
    return x.topk(2)


@ordinary(leaf(3))
def branch_on_a_value(x):
    return x * 2 if x.sum() > 0 else x * 3


@ordinary(leaf(3))
def gradient_inside(x):
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return slope.square().sum()


@ordinary(leaf(3))
def func_gradient_inside(x):
    return torch.func.grad(lambda v: (v**3).sum())(x)


@ordinary(leaf(4, 3))
def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda v: v.sin().cos(), x, use_reentrant=False)


@ordinary(leaf(3))
def tensor_hook(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y.sin()


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


@ordinary(leaf(3))
def custom_function(x):
    return _Cube.apply(x)


# ---------------------------------------------------------------- views


@ordinary(leaf(2, 3))
def view_of_an_argument(x):
    return x.view(-1)


@ordinary(leaf(2, 3))
def argument_itself(x):
    return x, x * 2


@ordinary(leaf(2, 3))
def views_of_an_intermediate(x):
    y = x * 2
    return y.view(-1), y.t()


@ordinary(leaf(2, 3))
def parts_of_an_argument(x):
    return x.unbind(0)


@ordinary(leaf(2, 3))
def detached_output(x):
    return x.detach(), x * 2


# ---------------------------------------------------------------- writes


@ordinary(plain(3))
def written_argument(x):
    x.add_(1)
    return x * 2


@ordinary(interior(3))
def written_with_gradients(x):
    x.mul_(2)
    return x.sum()


@ordinary(interior(3))
def written_and_returned(x):
    x.mul_(2)
    return x


@ordinary(interior(2, 3))
def written_and_viewed(x):
    x.mul_(2)
    return x.view(-1)


@ordinary(plain(2, 3), leaf(3))
def row_written(x, y):
    x[0] = y.detach()
    return x * y


@ordinary(leaf(3))
def leaf_written_without_gradients(x):
    with torch.no_grad():
        x.mul_(0.9)
    return x.sin()


@ordinary(plain(2, 3))
def transposed_in_place(x):
    x.t_()
    return x + 1


@ordinary(plain(3))
def made_to_require_grad(x):
    x.requires_grad_()
    return x * 2


@ordinary(lambda: [torch.ones(3), torch.ones(3)], leaf(3))
def list_written(buffers, x):
    torch._foreach_mul_(buffers, 2.0)
    return buffers[0] * x


def halves():
    base = torch.ones(6)
    return base[:4], base[2:]


def _overlapping():
    def overlapping_arguments(x, y):
        x.mul_(2)
        return x.sum() + y.sum()

    return overlapping_arguments, halves()


FUNCTIONS["overlapping_arguments"] = _overlapping


# ---------------------------------------------------------------- modules


def module(name, make, *args):
    """Register a module: copied, so that no test sees what another left in it."""
    FUNCTIONS[name] = lambda: (copy.deepcopy(make()), tuple(arg() for arg in args))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.steps.add_(1)
        return x * self.weight * self.steps


module("linear", lambda: nn.Linear(3, 2), plain(5, 3))
module("residual_block", Residual, plain(2, 4))
module("batch_norm", lambda: nn.BatchNorm1d(3), plain(4, 3))
module("batch_norm_eval", lambda: nn.BatchNorm1d(3).eval(), plain(4, 3))
module("tied_weights", Tied, plain(2, 4))
module("counting_buffer", Counting, plain(3))
module("recurrent", lambda: nn.GRU(3, 4, batch_first=True), plain(2, 5, 3))
