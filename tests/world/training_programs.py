"""Ordinary programs around training: each calls what `wrap` makes of its function several times, with other inputs and another state
of Python, and returns all that can be seen of that.
"""

import contextlib
import dataclasses
import enum
import functools
import random
import types
import warnings
import weakref
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.programs import Table
from tests.world.pieces import batches, gradients, mlp, numbers

program = PROGRAMS = Table()


@program
def scheduler_inside(wrap):
    m = mlp()
    opt = torch.optim.SGD(m.parameters(), 0.1)
    sch = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    def step(x, y):
        opt.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        opt.step()
        sch.step()
        return l.detach()

    c = wrap(step)
    return [c(x, y) for x, y in batches(4)], sch.get_last_lr(), list(m.parameters())


@program
def lr_changed_between(wrap):
    m = mlp()
    opt = torch.optim.SGD(m.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad(set_to_none=False)
        l = F.cross_entropy(m(x), y)
        l.backward()
        opt.step()
        return l.detach()

    c = wrap(step)
    out = []
    for i, (x, y) in enumerate(batches(5)):
        opt.param_groups[0]["lr"] = 0.1 / (i + 1)
        out.append(c(x, y))
    return out, list(m.parameters())


@program
def meter_class(wrap):
    class Meter:
        def __init__(self):
            self.sum = 0.0
            self.n = 0

        def update(self, v, n):
            self.sum += v * n
            self.n += n

        @property
        def avg(self):
            return self.sum / max(1, self.n)

    m = mlp()
    meter = Meter()

    def step(x, y):
        l = F.cross_entropy(m(x), y)
        meter.update(l.item(), len(x))
        return l

    c = wrap(step)
    return [c(x, y) for x, y in batches(4)], meter.avg, meter.n


@program
def ema_weights(wrap):
    m = mlp()
    ema = {k: v.clone() for k, v in m.state_dict().items()}

    def step(x):
        y = m(x)
        with torch.no_grad():
            for k, v in m.state_dict().items():
                ema[k].mul_(0.9).add_(v, alpha=0.1)
        return y

    c = wrap(step)
    out = []
    for x, _ in batches(3):
        out.append(c(x))
        with torch.no_grad():
            m[0].weight.add_(0.1)
    return out, ema


@program
def hook_removed(wrap):
    m = mlp()
    seen = []
    h = m[0].register_forward_hook(lambda mod, i, o: seen.append(o.shape[0]) or o * 2)
    c = wrap(m)
    out = [c(batches(1)[0][0])]
    out.append(c(batches(1, 7)[0][0]))
    h.remove()
    out.append(c(batches(1)[0][0]))
    return out, seen


@program
def param_grad_hook(wrap):
    m = mlp()
    seen = []
    m[0].weight.register_hook(lambda g: seen.append(g.norm()) or g * 0.5)
    c = wrap(m)
    for x, y in batches(3):
        F.cross_entropy(c(x), y).backward()
    return gradients(m), seen


@program
def custom_fn_counter(wrap):
    class C(torch.autograd.Function):
        n = 0

        @staticmethod
        def forward(ctx, x):
            C.n += 1
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            C.n += 10
            return g * 2

    c = wrap(lambda x: C.apply(x).sum())
    out = []
    for _ in range(3):
        x = numbers(0.2, -0.7, g=True)
        c(x).backward()
        out.append((x.grad, C.n))
    return out


@program
def grad_reversal_module(wrap):
    class Rev(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lam):
            ctx.lam = lam
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -ctx.lam * g, None

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(4, 4)
            self.lam = 0.1

        def forward(self, x):
            return Rev.apply(self.f(x), self.lam)

    m = M()
    c = wrap(m)
    out = []
    for i, (x, _) in enumerate(batches(4)):
        m.lam = 0.1 * i
        c(x).sum().backward()
        out.append(gradients(m))
        m.zero_grad()
    return out


@program
def counter_global_step(wrap):
    state = types.SimpleNamespace(step=0)

    def f(x):
        state.step += 1
        w = min(1.0, state.step / 3)
        return x * w

    c = wrap(f)
    return [c(numbers(1.0, 2.0)) for _ in range(6)], state.step


@program
def logging_every_n(wrap):
    lines = []

    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)
            self.it = 0

        def forward(self, x):
            y = self.l(x)
            if self.it % 2 == 0:
                lines.append(f"it {self.it} n {x.shape[0]}")
            self.it += 1
            return y

    m = L()
    c = wrap(m)
    out = [c(torch.ones(i + 1, 2)) for i in range(5)]
    return out, lines, m.it


@program
def print_shape(wrap):
    def f(x):
        print("shape", tuple(x.shape), x.dtype)
        return x * 2

    c = wrap(f)
    return [c(torch.ones(i + 1)) for i in range(4)]


@program
def warn_once(wrap):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.warned = False

        def forward(self, x):
            if not self.warned:
                warnings.warn("deprecated")
                self.warned = True
            return x + 1

    m = M()
    c = wrap(m)
    return [c(numbers(1.0)) for _ in range(3)], m.warned


@program
def generator_of_layers(wrap):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.ls = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.skip = {1}

        def active(self):
            for i, l in enumerate(self.ls):
                if i not in self.skip:
                    yield l

        def forward(self, x):
            for l in self.active():
                x = l(x).relu()
            return x

    m = M()
    c = wrap(m)
    out = [c(numbers(1.0, 2.0))]
    m.skip.add(2)
    out.append(c(numbers(1.0, 2.0)))
    m.skip.clear()
    out.append(c(numbers(1.0, 2.0)))
    return out


@program
def seeded_generator_self(wrap):
    class N(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = torch.Generator()
            self.g.manual_seed(1)

        def forward(self, x):
            return x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.g)

    m = N()
    c = wrap(m)
    return [c(torch.ones(6)) for _ in range(3)]


@program
def python_random_augment(wrap):
    rng = random.Random(5)

    def f(x):
        if rng.random() < 0.5:
            x = x.flip(0)
        return x * rng.uniform(0, 1)

    c = wrap(f)
    return [c(numbers(1.0, 2.0)) for _ in range(8)], rng.random()


@program
def dataclass_output(wrap):
    @dataclasses.dataclass
    class Out:
        logits: Any
        loss: Any = None
        extra: dict = dataclasses.field(default_factory=dict)

    m = mlp()

    def f(x, y=None):
        o = Out(m(x))
        if y is not None:
            o.loss = F.cross_entropy(o.logits, y)
            o.extra["n"] = len(y)
        return o

    c = wrap(f)
    x, y = batches(1)[0]
    r = [c(x), c(x, y)]
    r[1].loss.backward()
    return r, gradients(m)


@program
def intflag(wrap):
    class Fl(enum.IntFlag):
        N = 0
        R = 1
        S = 2

    st = {"f": Fl.R}

    def f(x):
        if st["f"] & Fl.R:
            x = x.relu()
        if Fl.S in st["f"]:
            x = x * 2
        return x

    c = wrap(f)
    out = []
    for v in (Fl.R, Fl.S, Fl.R | Fl.S, Fl.N):
        st["f"] = v
        out.append(c(numbers(1.0, -2.0)))
    return out


@program
def weakref_parent(wrap):
    class Child(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = weakref.ref(p)

        def forward(self, x):
            return x * self.p().scale

    class Par(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
            self.ch = Child(self)

        def forward(self, x):
            return self.ch(x)

    m = Par()
    c = wrap(m)
    out = [c(numbers(1.0))]
    m.scale = 3.0
    out.append(c(numbers(1.0)))
    m.scale = 5.0
    out.append(c(numbers(1.0)))
    return out


@program
def context_manager_class(wrap):
    class Scope:
        depth = 0
        log = []

        def __init__(self, n):
            self.n = n

        def __enter__(self):
            Scope.depth += 1
            Scope.log.append(("in", self.n))
            return self

        def __exit__(self, *a):
            Scope.depth -= 1
            Scope.log.append(("out", self.n))

    def f(x):
        with Scope("a"):
            x = x * Scope.depth
            with Scope("b"):
                x = x + Scope.depth
        return x

    c = wrap(f)
    return [c(numbers(1.0, 2.0)) for _ in range(3)], Scope.log, Scope.depth


@program
def contextlib_cm(wrap):
    flag = {"on": False}

    @contextlib.contextmanager
    def on():
        flag["on"] = True
        try:
            yield
        finally:
            flag["on"] = False

    def g(x):
        return x * 2 if flag["on"] else x

    def f(x):
        with on():
            y = g(x)
        return y + g(x)

    c = wrap(f)
    out = [c(numbers(1.0)), c(numbers(2.0))]
    flag["on"] = True
    out.append(c(numbers(1.0)))
    return out, flag


@program
def cached_property_tensor(wrap):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 3

        @functools.cached_property
        def pos(self):
            return torch.arange(self.n).float()

        def forward(self, x):
            return x + self.pos

    m = M()
    c = wrap(m)
    out = [c(torch.ones(3)), c(torch.ones(3))]
    m.n = 4
    del m.pos
    out.append(c(torch.ones(4)))
    out.append(c(torch.zeros(4)))
    return out


@program
def descriptor_counts(wrap):
    class Cnt:
        def __init__(self):
            self.n = 0

        def __get__(self, o, t=None):
            self.n += 1
            return 2.0

    class A:
        t = Cnt()

    a = A()
    c = wrap(lambda x: x * a.t + a.t)
    out = [c(numbers(1.0)) for _ in range(3)]
    return out, A.__dict__["t"].n


@program
def getattr_dynamic(wrap):
    class Cfg:
        def __init__(self, d):
            self.__dict__["d"] = d

        def __getattr__(self, k):
            try:
                return self.__dict__["d"][k]
            except KeyError:
                raise AttributeError(k) from None

        def __setattr__(self, k, v):
            self.d[k] = v

    cfg = Cfg({"a": 1.0})
    c = wrap(lambda x: x * cfg.a + getattr(cfg, "b", 0.0))
    out = [c(numbers(1.0))]
    cfg.a = 2.0
    out.append(c(numbers(1.0)))
    cfg.b = 3.0
    out.append(c(numbers(1.0)))
    return out


@program
def register_buffer_grow(wrap):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(2), persistent=False)

        def forward(self, x):
            if x.shape[0] > self.mask.shape[0]:
                self.mask = torch.ones(x.shape[0]) * 2
            return x * self.mask[: x.shape[0]]

    m = M()
    c = wrap(m)
    return [c(torch.ones(n)) for n in (2, 4, 3, 6, 2, 4)], m.mask


@program
def replay_buffer_deque(wrap):
    buf = deque(maxlen=3)

    def f(x):
        buf.append(x.mean().detach())
        return x * sum(buf) / len(buf)

    c = wrap(f)
    return [c(numbers(1.0, i)) for i in range(7)], list(buf)


@program
def history_item(wrap):
    hist = []
    m = mlp()

    def f(x, y):
        l = F.cross_entropy(m(x), y)
        hist.append(l.item())
        return l

    c = wrap(f)
    for x, y in batches(5):
        c(x, y).backward()
    return hist, gradients(m)


@program
def best_loss(wrap):
    """A state that is an input from the second graph on, and another that a branch counts."""
    state = {"best": float("inf"), "bad": 0}

    def f(x):
        loss = x.pow(2).sum()
        if loss.item() < state["best"]:
            state["best"], state["bad"] = loss.item(), 0
        else:
            state["bad"] += 1
        return loss

    c = wrap(f)
    return [c(numbers(1.0, v)) for v in (3.0, 2.0, 5.0, 1.0, 1.0, 4.0)], state


@program
def early_stop_exception(wrap):
    class Stop(Exception):
        pass

    def f(x):
        l = x.sum()
        if l > 5:
            raise Stop("big")
        return l * 2

    c = wrap(f)
    out = []
    for v in (1.0, 6.0, 2.0, 9.0):
        try:
            out.append(c(numbers(1.0, v)))
        except Stop as e:
            out.append(str(e))
    return out


@program
def parametrize_custom(wrap):
    class Sym(nn.Module):
        def forward(self, X):
            return X.triu() + X.triu(1).mT

    m = nn.Linear(3, 3)
    nn.utils.parametrize.register_parametrization(m, "weight", Sym())
    c = wrap(m)
    out = [c(numbers(1.0, 2.0, 3.0))]
    nn.utils.parametrize.remove_parametrizations(m, "weight")
    out.append(c(numbers(1.0, 2.0, 3.0)))
    return out


@program
def freeze_unfreeze(wrap):
    m = mlp()
    c = wrap(m)
    out = []
    for i, (x, y) in enumerate(batches(4)):
        m[0].requires_grad_(i % 2 == 0)
        m.zero_grad()
        F.cross_entropy(c(x), y).backward()
        out.append(gradients(m))
    return out


@program
def swap_head(wrap):
    m = mlp()
    c = wrap(m)
    x = batches(1)[0][0]
    out = [c(x)]
    m[2] = nn.Linear(6, 5)
    out.append(c(x))
    m.append(nn.ReLU())
    out.append(c(x))
    return out
