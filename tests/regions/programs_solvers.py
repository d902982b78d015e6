"""Custom Functions that differentiate again: equilibria, adjoints, energies, Functions in Functions, closed-over tensors.

Each maker gives (function, inputs, other leaves).
"""

import torch
from torch import nn
from torch.autograd import Function

from tests.programs import Table
from tests.regions.outcome import f, rnd
from tests.regions.programs_saved import Saved

program = Table()


# ------------------------------------------------ equilibrium / implicit
class Fixed(Function):
    @staticmethod
    def forward(ctx, x, w):
        z = torch.zeros_like(x)
        for _ in range(12):
            z = torch.tanh(z @ w * 0.2 + x)
        ctx.save_for_backward(z, x, w)
        return z

    @staticmethod
    def backward(ctx, g):
        z, x, w = ctx.saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            y = torch.tanh(z @ w * 0.2 + x)
        v = g
        for _ in range(12):
            v = torch.autograd.grad(y, z, v, retain_graph=True)[0] + g
        return torch.autograd.grad(y, (x, w), v)


@program
def deq_saved():
    return (lambda x, w: Fixed.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def deq_saved_nonleaf():
    return (lambda x, w: Fixed.apply(x * 2, w.sin()).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def deq_with_hook():
    class Deq(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3).double()

        def cell(self, z, x):
            return torch.tanh(self.lin(z) * 0.3 + x)

        def forward(self, x):
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(10):
                    z = self.cell(z, x)
            z = self.cell(z, x)
            z0 = z.detach().requires_grad_()
            f0 = self.cell(z0, x)

            def hook(g):
                v = g
                for _ in range(10):
                    v = torch.autograd.grad(f0, z0, v, retain_graph=True)[0] + g
                return v

            z.register_hook(hook)
            return z.sum()

    m = Deq()
    return m, [rnd(2, 3)], list(m.parameters())


class SqrtImplicit(Function):
    @staticmethod
    def forward(ctx, a):
        y = a.abs().sqrt()
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    def backward(ctx, g):
        a, y = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            r = y * y - a.abs()
            dy, da = torch.autograd.grad(r, (y, a), torch.ones_like(r))
        return -g * da / dy


@program
def implicit_function():
    return (lambda a: SqrtImplicit.apply(a).sum()), [rnd(4)], []


class Adjoint(Function):
    @staticmethod
    def forward(ctx, func, y0, t, *params):
        ctx.func = func
        with torch.no_grad():
            y = y0
            ys = [y]
            for i in range(len(t) - 1):
                y = y + (t[i + 1] - t[i]) * func(t[i], y)
                ys.append(y)
            sol = torch.stack(ys)
        ctx.save_for_backward(t, sol, *params)
        return sol

    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            t, sol, *params = ctx.saved_tensors
            params = tuple(params)
            a = g[-1]
            gp = [torch.zeros_like(p) for p in params]
            for i in range(len(t) - 1, 0, -1):
                h = t[i] - t[i - 1]
                with torch.enable_grad():
                    tt = t[i].detach().requires_grad_(True)
                    yy = sol[i].detach().requires_grad_(True)
                    fe = ctx.func(tt, yy)
                    _, vy, *vp = torch.autograd.grad(fe, (tt, yy, *params), -a, allow_unused=True, retain_graph=True)
                a = a - h * vy + g[i - 1]
                gp = [b - h * v if v is not None else b for b, v in zip(gp, vp, strict=True)]
        return None, a, None, *gp


@program
def adjoint_ode():
    class Func(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

        def forward(self, t, y):
            return self.net(y) * t

    m = Func()
    t = torch.linspace(0, 1, 5, dtype=torch.float64)
    return (lambda y: Adjoint.apply(m, y, t, *m.parameters()).sum()), [rnd(2, 3)], list(m.parameters())


# ------------------------------------------------ second derivative inside backward (energy)
class HvpInside(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x @ w).tanh().sum()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            e = (x @ w).tanh().sum()
            (gx,) = torch.autograd.grad(e, x, create_graph=True)
            (gw,) = torch.autograd.grad(gx.sum(), w)
        return g * gx.detach(), g * gw


@program
def second_inside():
    return (lambda x, w: HvpInside.apply(x, w)), [rnd(3, 3), rnd(3, 3)], []


class Nested(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return Saved.apply(x, w).sin()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            return torch.autograd.grad(Saved.apply(x, w).sin(), (x, w), g)


@program
def nested_functions():
    return (lambda x, w: Nested.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def nested_functions_deep():
    return (lambda x, w: Nested.apply(Nested.apply(x, w), w).sum()), [rnd(3, 3), rnd(3, 3)], []


# ------------------------------------------------ closed over
@program
def closed_over_in_backward():
    w = rnd(3, 3)

    class C(Function):
        @staticmethod
        def forward(ctx, x, w_):
            ctx.save_for_backward(x)
            return f(x, w_)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(f(x, w), (x, w), g)

    return (lambda x: C.apply(x, w).sum()), [rnd(3, 3)], [w]


@program
def closed_over_only_in_backward():
    w = rnd(3, 3)

    class C(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(f(x, w), (x,), g)[0]

    return (lambda x: C.apply(x).sum()), [rnd(3, 3)], [w]


@program
def apply_with_closed_over():
    w = rnd(3, 3)
    return (lambda x: Saved.apply(x, w).sum()), [rnd(3, 3)], [w]


@program
def gradient_by_closed_over_accumulates():
    w = rnd(3, 3)

    class C(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return f(x, w.detach())

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                torch.autograd.backward(f(x, w), g)
                return x.grad

    return (lambda x: C.apply(x).sum()), [rnd(3, 3)], [w]
