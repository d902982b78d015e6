"""Custom Functions that mark what they are given and return; the newer style of writing one.

Each maker gives (function, inputs, other leaves).
"""

import torch
from torch.autograd import Function
from torch.utils import checkpoint as cp

from tests.programs import Table
from tests.regions.outcome import f, rnd
from tests.regions.programs_saved import Saved

program = Table()


# ------------------------------------------------ setup_context, vmap, jvp
class Setup(Function):
    @staticmethod
    def forward(x, w):
        return f(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            return torch.autograd.grad(f(x, w), (x, w), g)


@program
def setup_context():
    return (lambda x, w: Setup.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class SetupPlain(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 2, g * x

    @staticmethod
    def jvp(ctx, tx, tw):
        x, w = ctx.saved_tensors
        return tx * w * 2 + x * tw


@program
def setup_generate_vmap():
    return (lambda x, w: torch.vmap(SetupPlain.apply)(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def setup_func_grad():
    return (lambda x, w: torch.func.grad(lambda x: SetupPlain.apply(x, w).sin().sum())(x)), [rnd(3, 3), rnd(3, 3)], []


@program
def setup_func_jvp():
    return (
        (lambda x, w: torch.func.jvp(lambda x: SetupPlain.apply(x, w), (x,), (torch.ones_like(x),))),
        [rnd(3, 3), rnd(3, 3)],
        [],
    )


@program
def setup_func_grad_saved():
    return (lambda x, w: torch.func.grad(lambda x: Setup.apply(x, w).sin().sum())(x)), [rnd(3, 3), rnd(3, 3)], []


class VmapStatic(Function):
    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 2, g * x

    @staticmethod
    def vmap(info, in_dims, x, w):
        return VmapStatic.apply(x, w), 0


@program
def vmap_staticmethod():
    return (lambda x, w: torch.vmap(VmapStatic.apply)(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


# ------------------------------------------------ marks
class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


@program
def mark_dirty():
    return (lambda x: Dirty.apply(x * 1).sum()), [rnd(3)], []


@program
def mark_dirty_used_later():
    def run(x):
        y = x * 1
        Dirty.apply(y)
        return y.sin().sum()

    return run, [rnd(3)], []


@program
def mark_dirty_of_view():
    def run(x):
        y = x * 1
        v = y[0]
        Dirty.apply(v)
        return y.sin().sum()

    return run, [rnd(3, 3)], []


class DirtySaved(Function):
    @staticmethod
    def forward(ctx, x, w):
        x.add_(w)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, w)
        return x

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * x, g * w


@program
def mark_dirty_saved():
    return (lambda x, w: DirtySaved.apply(x.clone(), w).sum()), [rnd(3), rnd(3)], []


@program
def mark_dirty_argument_no_grad():
    return (lambda x, w: DirtySaved.apply(x, w).sum()), [rnd(3, grad=False), rnd(3)], []


class NonDiff(Function):
    @staticmethod
    def forward(ctx, x):
        idx = x.argsort()
        y = x[idx]
        ctx.mark_non_differentiable(idx)
        ctx.save_for_backward(idx)
        return y, idx

    @staticmethod
    def backward(ctx, g, gi):
        (idx,) = ctx.saved_tensors
        out = torch.zeros_like(g)
        out[idx] = g * 2
        return out


@program
def non_differentiable():
    return (lambda x: NonDiff.apply(x)), [rnd(5)], []


class NonDiffFloat(Function):
    @staticmethod
    def forward(ctx, x):
        a, b = x.sin(), x.cos()
        ctx.mark_non_differentiable(b)
        return a, b

    @staticmethod
    def backward(ctx, ga, gb):
        return ga + gb


@program
def non_differentiable_float():
    return (lambda x: NonDiffFloat.apply(x)), [rnd(5)], []


@program
def non_differentiable_used():
    def run(x):
        a, b = NonDiffFloat.apply(x)
        return (a * b * x).sum()

    return run, [rnd(5)], []


class NoMaterialize(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, a, b):
        if b is None:
            return a * 7
        return a + b


@program
def no_materialize():
    return (lambda x: NoMaterialize.apply(x)[0].sum()), [rnd(5)], []


@program
def no_materialize_both():
    return (lambda x: NoMaterialize.apply(x)), [rnd(5)], []


class NoMaterializeNone(NoMaterialize):
    @staticmethod
    def backward(ctx, a, b):
        return None if a is None else a * 2


@program
def no_materialize_none():
    def run(x):
        _, b = NoMaterializeNone.apply(x)
        return b.sum() + x.sum()

    return run, [rnd(5)], []


# ------------------------------------------------ numbers, containers, None
class Mixed(Function):
    @staticmethod
    def forward(ctx, x, n, s, lst):
        ctx.n, ctx.k = n, len(lst)
        return x * n, s, 5

    @staticmethod
    def backward(ctx, g, *_):
        return g * ctx.n * ctx.k, None, None, None


@program
def mixed_arguments():
    def run(x):
        y, s, n = Mixed.apply(x, 3, "a", [1, 2])
        assert s == "a" and n == 5
        return y.sum()

    return run, [rnd(3)], []


class RandomBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


@program
def random_in_backward():
    return (lambda x: RandomBackward.apply(x).sum()), [rnd(3)], []


@program
def in_nn_checkpoint():
    return (
        (lambda x, w: cp.checkpoint(lambda x, w: Saved.apply(x, w).sum(), x, w, use_reentrant=False)),
        [rnd(3, 3), rnd(3, 3)],
        [],
    )


@program
def inner_grad_by_custom():
    def run(x, w):
        (g,) = torch.autograd.grad(Saved.apply(x, w).sum(), x)
        return g.sum() * 2

    return run, [rnd(3, 3), rnd(3, 3)], []


@program
def hook_on_output():
    def run(x, w):
        y = Saved.apply(x, w)
        y.register_hook(lambda g: g * 3)
        return y.sum()

    return run, [rnd(3, 3), rnd(3, 3)], []


class LossScale(Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        (s,) = ctx.saved_tensors
        return g * s, None


@program
def scale_by_tensor():
    return (lambda x, s: (LossScale.apply(x * 2, s)).sum()), [rnd(3), rnd(grad=False)], []


class CustomMatmulW(Function):
    @staticmethod
    def forward(ctx, x, w, b=None):
        ctx.save_for_backward(x, w, b)
        y = x @ w.t()
        return y if b is None else y + b

    @staticmethod
    def backward(ctx, g):
        x, w, b = ctx.saved_tensors
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            gx = g @ w
        if ctx.needs_input_grad[1]:
            gw = g.t() @ x
        if b is not None and ctx.needs_input_grad[2]:
            gb = g.sum(0)
        return gx, gw, gb


@program
def linear_without_bias():
    return (lambda x, w: CustomMatmulW.apply(x, w, None).sum()), [rnd(2, 3), rnd(4, 3)], []


@program
def linear_default_bias():
    return (lambda x, w: CustomMatmulW.apply(x, w).sum()), [rnd(2, 3), rnd(4, 3)], []


@program
def linear_bias():
    return (lambda x, w, b: CustomMatmulW.apply(x, w, b).sum()), [rnd(2, 3, grad=False), rnd(4, 3), rnd(4)], []
