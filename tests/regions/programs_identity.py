"""Custom Functions that return what they were given.

Each maker gives (function, inputs, other leaves).
"""

import torch
from torch import nn
from torch.autograd import Function

from tests.programs import Table
from tests.regions.outcome import rnd

program = Table()


# ------------------------------------------------ identity-returning
class Reverse(Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x

    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None


@program
def reversal_direct():
    return (lambda x: Reverse.apply(x, 0.5)), [rnd(3)], []


@program
def reversal_of_intermediate():
    return (lambda x: (Reverse.apply(x * 2, 0.5) * 3).sum()), [rnd(3)], []


@program
def reversal_of_input_used():
    return (lambda x: (Reverse.apply(x, 0.5) * x).sum()), [rnd(3)], []


class ReverseView(Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.lam, None


@program
def reversal_view_as():
    return (lambda x: (ReverseView.apply(x, 0.5) * 3).sum()), [rnd(3)], []


@program
def reversal_view_as_intermediate():
    return (lambda x: (ReverseView.apply(x.sin(), 0.5) * 3).sum()), [rnd(3)], []


@program
def reversal_view_as_output():
    return (lambda x: ReverseView.apply(x.sin(), 0.5)), [rnd(3)], []


class ReverseClone(ReverseView):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.clone()


@program
def reversal_clone():
    return (lambda x: (ReverseClone.apply(x, 0.5) * 3).sum()), [rnd(3)], []


@program
def reversal_in_domain_net():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.c, self.d = (nn.Linear(3, 3).double() for _ in range(3))

        def forward(self, x):
            h = self.f(x).relu()
            return self.c(h).sum() + self.d(Reverse.apply(h, 0.3)).square().sum()

    m = M()
    return m, [rnd(4, 3, grad=False)], list(m.parameters())


class ReverseTwo(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x, y

    @staticmethod
    def backward(ctx, a, b):
        return a * 2, b * 3


@program
def identity_two():
    def run(x, y):
        a, b = ReverseTwo.apply(x, y)
        return (a * b).sum()

    return run, [rnd(3), rnd(3)], []


class Swap(Function):
    @staticmethod
    def forward(ctx, x, y):
        return y, x

    @staticmethod
    def backward(ctx, a, b):
        return b * 2, a * 3


@program
def identity_swapped():
    def run(x, y):
        a, b = Swap.apply(x, y)
        return (a.sin() * b).sum()

    return run, [rnd(3), rnd(3)], []


class IdentityAndMore(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x, x * w

    @staticmethod
    def backward(ctx, a, b):
        (w,) = ctx.saved_tensors
        return a * 5 + b * w * 2, b * 3


@program
def identity_and_more():
    def run(x, w):
        a, b = IdentityAndMore.apply(x.exp(), w)
        return (a.sin() * b).sum()

    return run, [rnd(3), rnd(3)], []


class TakesTwoReturnsOne(Function):
    @staticmethod
    def forward(ctx, x, aux):
        ctx.shape = aux.shape
        return x

    @staticmethod
    def backward(ctx, g):
        return g, torch.full(ctx.shape, 0.25, dtype=g.dtype)


@program
def auxiliary_loss():
    return (lambda x, a: (TakesTwoReturnsOne.apply(x.sin(), a.sum()) * 2).sum()), [rnd(3), rnd(3)], []


class Clip(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


@program
def gradient_clip():
    return (lambda x: (Clip.apply(x.sin()) * x).sum()), [rnd(3)], []


@program
def gradient_clip_in_loop():
    def run(x, w):
        for _ in range(3):
            x = Clip.apply(torch.tanh(x @ w))
        return x.sum()

    return run, [rnd(3, 3), rnd(3, 3)], []


class Ste(Function):
    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return torch.nn.functional.hardtanh(g)


@program
def straight_through():
    return (lambda x: (Ste.apply(x.sin()) * x).sum()), [rnd(5)], []


class IdentityReshape(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(ctx.shape) * 2


@program
def returns_view_of_input():
    return (lambda x: (IdentityReshape.apply(x) * 3).sum()), [rnd(2, 3)], []


@program
def returns_view_of_input_as_output():
    return (lambda x: IdentityReshape.apply(x)), [rnd(2, 3)], []


class IdentitySetup(Function):
    @staticmethod
    def forward(x):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 4


@program
def identity_setup():
    return (lambda x: (IdentitySetup.apply(x) * 3).sum()), [rnd(2, 3)], []


@program
def identity_param():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(rnd(3, 3).detach())

        def forward(self, x):
            return (x @ Clip.apply(self.w)).sum()

    m = M()
    return m, [rnd(3, 3, grad=False)], list(m.parameters())


@program
def identity_under_no_grad():
    def run(x):
        with torch.no_grad():
            y = Clip.apply(x)
        return (y * x).sum()

    return run, [rnd(3)], []


@program
def identity_of_no_grad_input():
    return (lambda x, w: (Clip.apply(x) * w).sum()), [rnd(3, grad=False), rnd(3)], []


@program
def identity_then_inplace():
    def run(x):
        y = Clip.apply(x * 1)
        return y.mul(2).sum()

    return run, [rnd(3)], []


@program
def identity_is_input_object():
    def run(x):
        y = Clip.apply(x.sin())
        return y, y.cos()

    return run, [rnd(3)], []


class SaveIdentity(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x


@program
def identity_saved():
    return (lambda x: (SaveIdentity.apply(x.sin()) * x).sum()), [rnd(3)], []


class SavedOutput(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y * 2


@program
def saved_output():
    return (lambda x: SavedOutput.apply(x.sin()).sum()), [rnd(3)], []


class SavedMiddle(Function):
    @staticmethod
    def forward(ctx, x):
        m = x.exp()
        ctx.save_for_backward(m)
        return m.sin()

    @staticmethod
    def backward(ctx, g):
        (m,) = ctx.saved_tensors
        return g * m * m.cos() * 2


@program
def saved_intermediate():
    return (lambda x: SavedMiddle.apply(x.sin()).sum()), [rnd(3)], []


class SavedMiddleGrad(SavedMiddle):
    @staticmethod
    def backward(ctx, g):
        (m,) = ctx.saved_tensors
        with torch.enable_grad():
            m = m.requires_grad_()
            return torch.autograd.grad(m.sin() * m, m, g)[0]


@program
def saved_intermediate_marked():
    return (lambda x: SavedMiddleGrad.apply(x.sin()).sum()), [rnd(3)], []
