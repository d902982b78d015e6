"""Functions whose backward writes: a table of name -> a maker of (function, arguments, tensors that it may write to)."""

import torch
from torch import nn

from tests.programs import Table

case = PROGRAMS = Table()


def T(*shape, g=True):
    torch.manual_seed(len(shape))
    return torch.randn(*shape, requires_grad=g)


def fn_of(back, fwd=lambda ctx, x: x.clone()):
    class Fn(torch.autograd.Function):
        forward = staticmethod(fwd)
        backward = staticmethod(back)

    return Fn.apply


# each case: () -> (function, args tuple, tensors to watch)
@case
def ema():
    b = torch.zeros(())
    a = fn_of(lambda ctx, g: (b.mul_(0.9).add_(g.mean()), g)[1])
    return lambda x: (a(x * x)).sum(), (T(3),), [b]


@case
def counter():
    b = torch.zeros((), dtype=torch.long)
    a = fn_of(lambda ctx, g: (b.add_(1), g)[1])
    return lambda x: (a(x * x)).sum(), (T(3),), [b]


@case
def counter_used():
    b = torch.zeros(())
    a = fn_of(lambda ctx, g: (b.add_(1), g * b)[1])
    return lambda x: (a(x * x)).sum(), (T(3),), [b]


@case
def copy_grad():
    b = torch.zeros(3)
    a = fn_of(lambda ctx, g: (b.copy_(g), g)[1])
    return lambda x: (a(x * x)).sin().sum(), (T(3),), [b]


@case
def hook_buffer():
    b = torch.zeros(3)

    def f(x):
        y = x * x
        y.register_hook(lambda g: (b.add_(g), None)[1])
        return y.sin().sum()

    return f, (T(3),), [b]


@case
def hook_input():
    s = T(3, g=False)

    def f(x, s):
        y = x * x

        def h(g):
            s.mul_(0.5).add_(g)

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3), s), [s]


@case
def hook_input_read():
    s = T(3, g=False)

    def f(x, s):
        y = x * x

        def h(g):
            s.mul_(0.5).add_(g)
            return g * s

        y.register_hook(h)
        return (y.sin() * 1).sum()

    return f, (T(3), s), [s]


@case
def two_hooks_order():
    s = torch.zeros(3)

    def f(x):
        y = x * x
        z = y.sin()
        y.register_hook(lambda g: (s.mul_(2), None)[1])
        z.register_hook(lambda g: (s.add_(1), None)[1])
        return z.sum()

    return f, (T(3),), [s]


@case
def data_write():
    s = torch.zeros(3)

    def f(x):
        y = x * x
        y.register_hook(lambda g: (s.data.add_(g), None)[1])
        return y.sin().sum()

    return f, (T(3),), [s]


@case
def slice_write():
    s = torch.zeros(4, 3)

    def f(x):
        y = x * x
        y.register_hook(lambda g: (s[1].copy_(g), None)[1])
        return y.sin().sum()

    return f, (T(3),), [s]


@case
def index_put():
    s = torch.zeros(4, 3)
    i = torch.tensor([1, 2])

    def f(x):
        y = x * x

        def h(g):
            s[i] = g

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3),), [s]


@case
def swap_buffers():
    a = torch.ones(3)
    b = torch.zeros(3)

    def f(x):
        y = x * x

        def h(g):
            t = a.clone()
            a.copy_(b)
            b.copy_(t)

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3),), [a, b]


@case
def copy_other_live():
    a = torch.ones(3)
    b = torch.zeros(3)

    def f(x):
        y = x * x

        def h(g):
            a.copy_(b)
            b.add_(1)

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3),), [a, b]


@case
def param_write():
    w = nn.Parameter(torch.ones(3))

    def f(x):
        y = x * 2

        @torch.no_grad()
        def h(g):
            w.add_(g)

        y.register_hook(h)
        return (y.sin()).sum()

    return f, (T(3),), [w]


@case
def param_used_and_written():
    w = nn.Parameter(torch.ones(3))

    def f(x):
        z = x * w
        y = z.sin()

        def h(g):
            with torch.no_grad():
                w.add_(g)

        x2 = x * 1
        x2.register_hook(h)
        return (x2 + y).sum()

    return f, (T(3),), [w]


@case
def fwd_and_bwd():
    b = torch.zeros(3)
    a = fn_of(lambda ctx, g: (b.add_(g), g * b)[1])

    def f(x):
        b.mul_(0.5).add_(x.detach())
        return a(x * x).sin().sum()

    return f, (T(3),), [b]


@case
def fwd_reads_bwd_writes():
    b = torch.ones(3)
    a = fn_of(lambda ctx, g: (b.add_(g), g)[1])

    def f(x):
        return (a(x * x) * 1).sin().sum() + b.detach().clone().sum()

    return f, (T(3),), [b]


@case
def saved_tensor():
    def fwd(ctx, x):
        h = x.exp()
        ctx.save_for_backward(h)
        return h * 2

    def bwd(ctx, g):
        (h,) = ctx.saved_tensors
        h.mul_(2)
        return g * h

    a = fn_of(bwd, fwd)
    return lambda x: a(x * x).sin().sum(), (T(3),), []


@case
def ctx_tensor():
    def fwd(ctx, x):
        ctx.h = x.exp()
        return ctx.h * 2

    def bwd(ctx, g):
        ctx.h.mul_(2)
        return g * ctx.h

    a = fn_of(bwd, fwd)
    return lambda x: a(x * x).sin().sum(), (T(3),), []


@case
def ctx_output():
    def fwd(ctx, x):
        h = x.exp()
        ctx.h = h
        return h

    def bwd(ctx, g):
        r = g * ctx.h
        ctx.h.zero_()
        return r

    a = fn_of(bwd, fwd)
    return lambda x: a(x * x), (T(3),), []


@case
def spectral_like():
    u = torch.ones(3)

    def f(W, x):
        v = W.t() @ u
        v = v / v.norm()
        s = u @ W @ v

        def h(g):
            with torch.no_grad():
                u.copy_((W @ v) / (W @ v).norm())

        y = (x @ W.t()) / s
        y.register_hook(h)
        return y.sum()

    return f, (T(3, 3), T(2, 3)), [u]


@case
def clip_norm():
    n = torch.zeros(())

    def f(x):
        y = x * x

        def h(g):
            n.copy_(g.norm())
            return g / (n + 1)

        y.register_hook(h)
        return y.exp().sum()

    return f, (T(3),), [n]


@case
def ste_observer():
    lo = torch.tensor(0.0)
    hi = torch.tensor(0.0)

    def bwd(ctx, g):
        lo.copy_(torch.minimum(lo, g.min()))
        hi.copy_(torch.maximum(hi, g.max()))
        return g

    a = fn_of(bwd, lambda ctx, x: x.round())
    return lambda x: (a(x * 3) * x).sum(), (T(5),), [lo, hi]


@case
def grad_inplace_middle():
    def f(x):
        y = x * x
        z = y.sin()
        z.register_hook(lambda g: g.mul_(2))
        return (z * 3).sum()

    return f, (T(3),), []


@case
def two_outputs():
    b = torch.zeros(3)
    c = torch.zeros(3)

    def f(x):
        y = x * 2
        z = x * 3
        y.register_hook(lambda g: (b.add_(g), None)[1])
        z.register_hook(lambda g: (c.add_(g), None)[1])
        return y.sin(), z.cos()

    return f, (T(3),), [b, c]


@case
def two_inputs():
    b = torch.zeros(3)
    c = torch.zeros(3)

    def f(x, w):
        y = x * 2
        z = w * 3
        y.register_hook(lambda g: (b.add_(g), None)[1])
        z.register_hook(lambda g: (c.add_(g), None)[1])
        return (y * z).sum()

    return f, (T(3), T(3)), [b, c]


@case
def inner_leaf():
    b = torch.zeros(3)

    def f(x):
        w = torch.ones(3, requires_grad=True)
        w.register_hook(lambda g: (b.add_(g), None)[1])
        return (x * w).sum()

    return f, (T(3),), [b]


@case
def grad_fn_hook():
    b = torch.zeros(3)

    def f(x):
        y = x * x
        y.grad_fn.register_hook(lambda gi, go: (b.add_(go[0]), None)[1])
        return y.sin().sum()

    return f, (T(3),), [b]


@case
def grad_fn_prehook():
    b = torch.zeros(3)

    def f(x):
        y = x * x
        y.grad_fn.register_prehook(lambda go: (b.add_(go[0]), None)[1])
        return y.sin().sum()

    return f, (T(3),), [b]


@case
def multi_grad_hook():
    b = torch.zeros(3)

    def f(x):
        y = x * x
        z = x * 2
        torch.autograd.graph.register_multi_grad_hook((y, z), lambda gs: (b.add_(gs[0]), None)[1])
        return (y.sin() + z).sum()

    return f, (T(3),), [b]


class Stat(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.register_buffer("g", torch.zeros(3))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        torch.manual_seed(0)
        nn.init.normal_(self.l.weight)
        nn.init.zeros_(self.l.bias)

    def forward(self, x):
        y = self.l(x)
        y.register_hook(self.h)
        return y.sin().sum()

    def h(self, g):
        self.g.mul_(0.9).add_(g.mean(0) * 0.1)
        self.n.add_(1)


@case
def module_buffers():
    m = Stat()
    return m, (T(2, 3),), [m.g, m.n, *m.parameters()]


@case
def module_iadd():
    class M(Stat):
        def h(self, g):
            self.n += 1
            self.g *= 0.5

    m = M()
    return m, (T(2, 3),), [m.g, m.n, *m.parameters()]


@case
def full_backward_hook():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(3, 3)
            self.register_buffer("g", torch.zeros(3))
            self.l.register_full_backward_hook(lambda m, gi, go: (self.g.add_(go[0].sum(0)), None)[1])

        def forward(self, x):
            return self.l(x * 1).sin().sum()

    m = M()
    return m, (T(2, 3),), [m.g]


@case
def full_backward_pre_hook():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(3, 3)
            self.register_buffer("g", torch.zeros(3))
            self.l.register_full_backward_pre_hook(lambda m, go: (self.g.add_(go[0].sum(0)), None)[1])

        def forward(self, x):
            return self.l(x * 1).sin().sum()

    m = M()
    return m, (T(2, 3),), [m.g]


@torch.library.custom_op("effects::accumulate", mutates_args={"b"})
def acc(b: torch.Tensor, g: torch.Tensor) -> None:
    b.add_(g)


@acc.register_fake
def _(b, g):
    return None


@case
def custom_op_mut():
    b = torch.zeros(3)

    def bwd(ctx, g):
        torch.ops.effects.accumulate(b, g)
        return g

    a = fn_of(bwd)
    return lambda x: a(x * x).sin().sum(), (T(3),), [b]


@case
def foreach():
    b = torch.zeros(3)
    c = torch.zeros(3)

    def bwd(ctx, g):
        torch._foreach_add_([b, c], [g, g * 2])
        return g

    a = fn_of(bwd)
    return lambda x: a(x * x).sin().sum(), (T(3),), [b, c]


@case
def out_variant():
    b = torch.zeros(3)

    def bwd(ctx, g):
        torch.mul(g, 2, out=b)
        return g + b

    a = fn_of(bwd)
    return lambda x: a(x * x).sin().sum(), (T(3),), [b]


@case
def random_noise():
    b = torch.zeros(3)

    def bwd(ctx, g):
        b.normal_()
        return g + b

    a = fn_of(bwd)
    return lambda x: a(x * x).sin().sum(), (T(3),), [b]


@case
def nonleaf_input():
    s = T(3, g=False)

    def f(x, s):
        y = x * x

        def h(g):
            s.add_(g)

        y.register_hook(h)
        return y.sin()

    return f, (T(3), s), [s]


@case
def view_arg():
    base = torch.zeros(2, 3)
    s = base[0]

    def f(x, s):
        y = x * x

        def h(g):
            s.add_(g)

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3), s), [base]


@case
def shared_args():
    base = torch.zeros(2, 3)
    s = base[0]

    def f(x, s, base):
        y = x * x

        def h(g):
            s.add_(g)
            base.mul_(2)

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3), s, base), [base]


@case
def with_grad_write():
    s = torch.zeros(3)

    def f(x):
        y = x * x

        def h(g):
            s.add_(g.detach())

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3),), [s]


@case
def once_diff():
    s = torch.zeros(3)

    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            s.add_(g)
            return 2 * x * g

    return lambda x: Fn.apply(x).sin().sum(), (T(3),), [s]


@case
def tap_none():
    s = torch.zeros(3)
    a = fn_of(lambda ctx, g: (s.copy_(g), None)[1])
    return lambda x: (a(x * x) + x).sum(), (T(3),), [s]


@case
def fill_bool():
    s = torch.zeros(3, dtype=torch.bool)
    a = fn_of(lambda ctx, g: (s.copy_(g > 0), g)[1])
    return lambda x: a(x * x).sin().sum(), (T(3),), [s]


@case
def checked_bwd():
    s = torch.zeros(3)

    def bwd(ctx, g):
        torch._assert_async((g < 100).all())
        s.add_(g)
        return g

    a = fn_of(bwd)
    return lambda x: a(x * x).sin().sum(), (T(3),), [s]


@case
def write_input_itself():
    def f(x, s):
        y = x * s.sum()
        a = fn_of(lambda ctx, g: (s.zero_(), g)[1])
        return a(y * 1).sin().sum()

    s = T(3, g=False)
    return f, (T(3), s), [s]


@case
def live_view_read():
    s = torch.arange(6.0).reshape(2, 3)

    def f(x):
        y = x * x

        def h(g):
            s[0].add_(g)
            return g * s[0] + s[1]

        y.register_hook(h)
        return y.sin().sum()

    return f, (T(3),), [s]


@case
def conv_stat():
    m = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    torch.manual_seed(0)
    for p in m.parameters():
        nn.init.normal_(p)
    s = torch.zeros(2)

    def f(x):
        y = m(x)
        y.register_hook(lambda g: (s.add_(g.sum((0, 2, 3))), None)[1])
        return y.sin().sum()

    return f, (T(2, 1, 5, 5),), [s, *m.buffers()]
