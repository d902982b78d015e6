"""Custom Functions whose backward differentiates again: by what it saved, by copies of that, by what is on `ctx`.

Each maker gives (function, inputs, other leaves).
"""

import torch
from torch import nn
from torch.autograd import Function

from tests.programs import Table
from tests.regions.outcome import f, rnd

program = Table()


# ------------------------------------------------ backward differentiates what was saved
class Saved(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return f(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = f(x, w)
            return torch.autograd.grad(y, (x, w), g)


@program
def saved_leaves():
    return Saved.apply, [rnd(3, 3), rnd(3, 3)], []


@program
def saved_leaf_and_intermediate():
    return (lambda x, w: Saved.apply(x * 2, w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def saved_param_of_module():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(rnd(3, 3).detach())

        def forward(self, x):
            return Saved.apply(x, self.w).sum()

    m = M()
    return m, [rnd(3, 3)], list(m.parameters())


@program
def saved_only_w():
    return (lambda x, w: Saved.apply(x, w).sum()), [rnd(3, 3, grad=False), rnd(3, 3)], []


@program
def saved_twice_applied():
    return (lambda x, w: Saved.apply(Saved.apply(x, w), w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def saved_nonleaf_arg():
    x, w = rnd(3, 3), rnd(3, 3)
    return (lambda a, b: Saved.apply(a, b).sum()), [x, w], []


@program
def same_tensor_twice():
    return (lambda x: Saved.apply(x, x)), [rnd(3, 3)], []


class Detached(Saved):
    @staticmethod
    def backward(ctx, g):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = f(x, w)
        return torch.autograd.grad(y, (x, w), g)


@program
def detached_copies():
    return (lambda x, w: Detached.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class DetachedBackward(Saved):
    @staticmethod
    def backward(ctx, g):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = f(x, w)
        torch.autograd.backward(y, g)
        return x.grad, w.grad


@program
def detached_copies_autograd_backward():
    return (lambda x, w: DetachedBackward.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class DetachedMethod(Saved):
    @staticmethod
    def backward(ctx, g):
        x, w = (t.detach().clone().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = f(x, w)
            y.backward(g)
        return x.grad, w.grad


@program
def detached_copies_method_backward():
    return (lambda x, w: DetachedMethod.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class Vjp(Saved):
    @staticmethod
    def backward(ctx, g):
        _, pull = torch.func.vjp(f, *ctx.saved_tensors)
        return pull(g)


@program
def func_vjp_inside():
    return (lambda x, w: Vjp.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class AutogradVjp(Saved):
    @staticmethod
    def backward(ctx, g):
        return torch.autograd.functional.vjp(f, ctx.saved_tensors, g)[1]


@program
def functional_vjp_inside():
    return (lambda x, w: AutogradVjp.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class OnlyWanted(Saved):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = f(x, w)
            wanted = [t for t, n in zip((x, w), ctx.needs_input_grad, strict=True) if n]
            found = iter(torch.autograd.grad(y, wanted, g))
        return tuple(next(found) if n else None for n in ctx.needs_input_grad)


@program
def needs_input_grad_all():
    return (lambda x, w: OnlyWanted.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def needs_input_grad_some():
    return (lambda x, w: OnlyWanted.apply(x, w).sum()), [rnd(3, 3, grad=False), rnd(3, 3)], []


@program
def needs_input_grad_some2():
    return (lambda x, w: OnlyWanted.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3, grad=False)], []


class AllowUnused(Saved):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = f(x, w.detach())
            return torch.autograd.grad(y, (x, w), g, allow_unused=True)


@program
def allow_unused():
    return (lambda x, w: AllowUnused.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class OnCtx(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w
        return f(x, w)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            return torch.autograd.grad(f(ctx.x, ctx.w), (ctx.x, ctx.w), g)


@program
def ctx_attributes():
    return (lambda x, w: OnCtx.apply(x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


class ModuleOnCtx(Function):
    @staticmethod
    def forward(ctx, x, module, *params):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        params = tuple(ctx.module.parameters())
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), (x, *params), g)
        return found[0], None, *found[1:]


@program
def module_on_ctx():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    return (lambda x: ModuleOnCtx.apply(x, m, *m.parameters()).sum()), [rnd(3, 3)], list(m.parameters())


@program
def module_on_ctx_in_module():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()

        def forward(self, x):
            return ModuleOnCtx.apply(x, self.inner, *self.inner.parameters()).sum()

    m = M()
    return m, [rnd(3, 3)], list(m.parameters())


class ModuleBackward(ModuleOnCtx):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        params = tuple(ctx.module.parameters())
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), g, inputs=[x])
        return x.grad, None, *(None for _ in params)


@program
def module_backward_inputs():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    return (lambda x: ModuleBackward.apply(x, m, *m.parameters()).sum()), [rnd(3, 3)], list(m.parameters())


class ModuleAccumulates(Function):
    """As the reentrant checkpoint: parameters get .grad inside the backward."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), g)
        return x.grad, None


@program
def reentrant_checkpoint_accumulates():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    return (lambda x: ModuleAccumulates.apply(x, m).sum()), [rnd(3, 3)], list(m.parameters())


class OldCheckpoint(Function):
    @staticmethod
    def forward(ctx, run, *args):
        ctx.run = run
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run(*args)

    @staticmethod
    def backward(ctx, *gs):
        args = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.run(*args)
        torch.autograd.backward(out, *gs)
        return None, *(a.grad for a in args)


@program
def old_checkpoint():
    return (lambda x, w: OldCheckpoint.apply(f, x, w).sum()), [rnd(3, 3), rnd(3, 3)], []


@program
def old_checkpoint_stacked():
    def run(x, w, v):
        for _ in range(3):
            x = OldCheckpoint.apply(f, x, w)
        return OldCheckpoint.apply(f, x, v).sum()

    return run, [rnd(3, 3), rnd(3, 3), rnd(3, 3)], []


@program
def old_checkpoint_two_outputs():
    class Two(OldCheckpoint):
        @staticmethod
        def backward(ctx, *gs):
            args = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
            with torch.enable_grad():
                out = ctx.run(*args)
            torch.autograd.backward(out, gs)
            return None, *(a.grad for a in args)

    return (lambda x, w: Two.apply(lambda x, w: (f(x, w), x.sin() * w), x, w)), [rnd(3, 3), rnd(3, 3)], []


class Reversible(Function):
    @staticmethod
    def forward(ctx, x1, x2, fm, gm, *params):
        with torch.no_grad():
            y1 = x1 + fm(x2)
            y2 = x2 + gm(y1)
        ctx.fm, ctx.gm = fm, gm
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx, d1, d2):
        y1, y2 = ctx.saved_tensors
        fp, gp = tuple(ctx.fm.parameters()), tuple(ctx.gm.parameters())
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            g_y1 = ctx.gm(y1)
            grads = torch.autograd.grad(g_y1, (y1, *gp), d2)
        with torch.no_grad():
            x2 = y2 - g_y1
            d1 = d1 + grads[0]
        with torch.enable_grad():
            x2 = x2.detach().requires_grad_()
            f_x2 = ctx.fm(x2)
            fgrads = torch.autograd.grad(f_x2, (x2, *fp), d1)
        return d1, d2 + fgrads[0], None, None, *fgrads[1:], *grads[1:]


@program
def reversible_block():
    fm = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    gm = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()

    def run(a, b):
        for _ in range(2):
            a, b = Reversible.apply(a, b, fm, gm, *fm.parameters(), *gm.parameters())
        return (a * b).sum()

    return run, [rnd(2, 3), rnd(2, 3)], [*fm.parameters(), *gm.parameters()]
