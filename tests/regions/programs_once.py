"""Custom Functions that may be differentiated once.

Each maker gives (function, inputs, other leaves).
"""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.programs import Table
from tests.regions.outcome import f, rnd
from tests.regions.programs_saved import Saved

program = Table()


# ------------------------------------------------ once_differentiable
class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


@program
def once_simple():
    return (lambda x: Once.apply(x)), [rnd(3)], []


@program
def once_of_product():
    return (lambda x, w: (Once.apply(x * w) * x).sum()), [rnd(3), rnd(3)], []


class OnceLinear(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * 3


@program
def once_linear():
    return (lambda x: OnceLinear.apply(x)), [rnd(3)], []


@program
def once_linear_squared():
    return (lambda x: OnceLinear.apply(x).square().sum()), [rnd(3)], []


class OnceIdentity(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g


@program
def once_identity():
    return (lambda x: OnceIdentity.apply(x.sin()).sum()), [rnd(3)], []


class OnceConst(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return torch.ones_like(g)


@program
def once_constant():
    return (lambda x: OnceConst.apply(x)), [rnd(3)], []


class OnceTwo(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y, g * x


@program
def once_two():
    return (lambda x, y: OnceTwo.apply(x, y).sum()), [rnd(3), rnd(3)], []


@program
def once_two_one_grad():
    return (lambda x, y: OnceTwo.apply(x, y).sum()), [rnd(3), rnd(3, grad=False)], []


@program
def once_and_other_path():
    return (lambda x, y: OnceTwo.apply(x, y).sum() + (x**3).sum()), [rnd(3), rnd(3)], []


@program
def once_then_detached():
    return (lambda x, y: OnceTwo.apply(x, y).detach().sum() * (x**3).sum()), [rnd(3), rnd(3)], []


@program
def once_inner_gradient():
    def run(x, y):
        (g,) = torch.autograd.grad(OnceTwo.apply(x, y).sum(), x)
        return (g * x).sum()

    return run, [rnd(3), rnd(3)], []


@program
def once_inner_gradient_twice():
    def run(x, y):
        (g,) = torch.autograd.grad(OnceTwo.apply(x, y).sum(), x, create_graph=True)
        return (g * x).sum()

    return run, [rnd(3), rnd(3)], []


class OnceSaved(Saved):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = f(x, w)
            return torch.autograd.grad(y, (x, w), g)


@program
def once_saved():
    return (lambda x, w: OnceSaved.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def once_module():
    m = nn.Linear(3, 3).double()
    return (lambda x: Once.apply(m(x)).sum()), [rnd(2, 3)], list(m.parameters())


@program
def once_some_outputs():
    return (lambda x, y: (Once.apply(x), (x * y).sin())), [rnd(3), rnd(3)], []
