"""Ordinary programs around training: each calls what `wrap` makes of its function several times, with other inputs and another state
of Python, and returns all that can be seen of that.
"""

import abc
import contextvars
import copy
import dataclasses
import functools
import math
import random
import types
import warnings
from collections import ChainMap, OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

from tests.programs import Table
from tests.world.pieces import batches, gradients, mlp, numbers

program = PROGRAMS = Table()
S = types.SimpleNamespace()


@program
def trainer_class(wrap):
    class Trainer:
        def __init__(self, m):
            self.m = m
            self.opt = torch.optim.SGD(m.parameters(), 0.1)
            self.step_n = 0
            self.hist = []
            self.cbs = []

        def on(self, cb):
            self.cbs.append(cb)

        def step(self, b):
            x, y = b
            l = F.cross_entropy(self.m(x), y)
            l.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step_n += 1
            for cb in self.cbs:
                cb(self, l.detach())
            return l.detach()

    t = Trainer(mlp())
    t.on(lambda tr, l: tr.hist.append(l))
    c = wrap(t.step)
    return [c(b) for b in batches(4)], t.step_n, t.hist, list(t.m.parameters())


@program
def singledispatch(wrap):
    @functools.singledispatch
    def g(v, x):
        return x

    @g.register
    def _(v: int, x):
        return x * v

    @g.register
    def _(v: str, x):
        return x + len(v)

    c = wrap(lambda x, v: g(v, x))
    out = [c(numbers(1.0), v) for v in (2, "abc", None, 5, 3.0)]
    g.register(float, lambda v, x: x - v)
    out.append(c(numbers(1.0), 3.0))
    return out


@program
def chainmap_cfg(wrap):
    base = {"a": 1.0, "b": 2.0}
    over = {}
    cm = ChainMap(over, base)
    c = wrap(lambda x: x * cm["a"] + cm["b"])
    out = [c(numbers(1.0))]
    over["a"] = 5.0
    out.append(c(numbers(1.0)))
    base["b"] = 7.0
    out.append(c(numbers(1.0)))
    return out


@program
def contextvar_set_inside(wrap):
    v = contextvars.ContextVar("v", default=1.0)

    def f(x):
        t = v.set(v.get() * 2)
        y = x * v.get()
        v.reset(t)
        return y

    c = wrap(f)
    out = [c(numbers(1.0))]
    v.set(4.0)
    out.append(c(numbers(1.0)))
    return out, v.get()


@program
def mixin_mro_super(wrap):
    class Base(nn.Module):
        def forward(self, x):
            return x

    class Sc(Base):
        k = 2.0

        def forward(self, x):
            return super().forward(x) * self.k

    class Sh(Base):
        def forward(self, x):
            return super().forward(x) + 1

    class M(Sc, Sh):
        pass

    m = M()
    c = wrap(m)
    out = [c(numbers(1.0))]
    Sc.k = 3.0
    out.append(c(numbers(1.0)))
    M.k = 5.0
    out.append(c(numbers(1.0)))
    m.k = 7.0
    out.append(c(numbers(1.0)))
    return out


@program
def try_except_keyerror(wrap):
    d = {"a": 2.0}

    def f(x, k):
        try:
            return x * d[k]
        except KeyError:
            d[k] = 1.0
            return x

    c = wrap(f)
    return [c(numbers(3.0), k) for k in ("a", "b", "b", "c", "a")], d


@program
def custom_optimizer(wrap):
    class Lion(torch.optim.Optimizer):
        def __init__(self, ps, lr):
            super().__init__(ps, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    st = self.state[p]
                    if not st:
                        st["m"] = torch.zeros_like(p)
                        st["t"] = 0
                    st["t"] += 1
                    p.add_(st["m"].lerp(p.grad, 0.1).sign(), alpha=-g["lr"] / math.sqrt(st["t"]))
                    st["m"].lerp_(p.grad, 0.01)

    m = mlp()
    opt = Lion(m.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        opt.step()
        return l.detach()

    c = wrap(step)
    return [c(*d) for d in batches(5)], list(m.parameters()), [s["t"] for s in opt.state.values()]


@program
def rnn_hidden_state(wrap):
    class R(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.GRUCell(2, 3)
            self.h = None

        def forward(self, x):
            h = torch.zeros(x.shape[0], 3) if self.h is None else self.h.detach()
            self.h = self.r(x, h)
            return self.h

    m = R()
    c = wrap(m)
    out = []
    for i in range(5):
        y = c(torch.ones(2, 2) * i)
        y.sum().backward()
        out.append(y)
    m.h = None
    out.append(c(torch.ones(2, 2)))
    return out, gradients(m)


@program
def layer_drop_random(wrap):
    class LD(nn.Module):
        def __init__(self):
            super().__init__()
            self.ls = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.p = 0.5

        def forward(self, x):
            for l in self.ls:
                if self.training and random.random() < self.p:
                    continue
                x = l(x)
            return x

    m = LD()
    c = wrap(m)
    return [c(numbers(1.0, 2.0)) for _ in range(8)], random.random()


@program
def pre_hook_modifies_kwargs(wrap):
    class A(nn.Module):
        def forward(self, x, scale=1.0):
            return x * scale

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = A()

        def forward(self, x):
            return self.a(x, scale=2.0)

    m = M()
    cfg = {"s": 3.0}
    m.a.register_forward_pre_hook(lambda mod, a, k: (a, {**k, "scale": k["scale"] * cfg["s"]}), with_kwargs=True)
    c = wrap(m)
    out = [c(numbers(1.0))]
    cfg["s"] = 5.0
    out.append(c(numbers(1.0)))
    return out


@program
def feature_extractor_dict(wrap):
    class FE(nn.Module):
        def __init__(self, m, names):
            super().__init__()
            self.m = m
            self.f = {}
            for n, s in m.named_modules():
                if n in names:
                    s.register_forward_hook(self.mk(n))

        def mk(self, n):
            def h(s, i, o):
                self.f[n] = o

            return h

        def forward(self, x):
            self.f.clear()
            y = self.m(x)
            return y, dict(self.f)

    fe = FE(mlp(), {"0", "2"})
    c = wrap(fe)
    out = []
    for x, _ in batches(3):
        o, f = c(x)
        (o.sum() + f["0"].pow(2).sum()).backward()
        out.append((o, f))
    return out, gradients(fe), sorted(fe.f)


@program
def ordered_dict_lru(wrap):
    class LRU(OrderedDict):
        def get2(self, k, mk):
            if k in self:
                self.move_to_end(k)
                return self[k]
            self[k] = mk()
            if len(self) > 2:
                self.popitem(last=False)
            return self[k]

    l = LRU()
    c = wrap(lambda x, k: x * l.get2(k, lambda: k + 1.0))
    return [c(numbers(1.0), k) for k in (1, 2, 1, 3, 2, 1)], list(l)


@program
def linked_list(wrap):
    class N:
        def __init__(self, v, nx=None):
            self.v = v
            self.nx = nx

    h = N(1.0, N(2.0, N(3.0)))

    def f(x):
        n = h
        s = 0
        while n:
            s = s + x * n.v
            n = n.nx
        return s

    c = wrap(f)
    out = [c(numbers(1.0))]
    h.nx.nx.v = 5.0
    out.append(c(numbers(1.0)))
    h.nx.nx.nx = N(8.0)
    out.append(c(numbers(1.0)))
    return out


@program
def id_of_module(wrap):
    m = mlp()
    memo = {}

    def visit(s):
        memo[id(s)] = type(s).__name__
        [visit(k) for k in s.children()]

    def f(x):
        memo.clear()
        visit(m)
        return m(x) * len(memo)

    c = wrap(f)
    x = batches(1)[0][0]
    out = [c(x)]
    m.append(nn.ReLU())
    out.append(c(x))
    return out


@program
def part_arg_and_state(wrap):
    st = {"w": numbers(1.0, 2.0)}
    c = wrap(lambda x: x * 2 + st["w"])
    out = [c(st["w"]), c(numbers(1.0, 1.0))]
    w = numbers(4.0, 4.0)
    out.append(c(w))
    st["w"] = w
    out.append(c(w))
    return out


@program
def cache_mutable_result(wrap):
    @functools.cache
    def lst(n):
        return [n]

    def f(x, n):
        l = lst(n)
        l.append(len(l))
        return x * sum(l)

    c = wrap(f)
    return [c(numbers(1.0), n) for n in (1, 1, 2, 1)], lst(1), lst(2)


@program
def list_returned_hook_fills(wrap):
    def f(x):
        log = []
        y = x.sin()
        y.register_hook(lambda g: log.append(g))
        return y.sum(), log

    c = wrap(f)
    out = []
    for i in range(3):
        x = numbers(0.1, i, g=True)
        y, l = c(x)
        y.backward()
        out.append((x.grad, list(l)))
    return out


@program
def obj_returned_hook_fills(wrap):
    class Rec:
        def __init__(s):
            s.g = None
            s.n = 0

        def __call__(s, g):
            s.g = g
            s.n += 1

    def f(x):
        r = Rec()
        y = x.sin()
        y.register_hook(r)
        return y.sum(), r

    c = wrap(f)
    out = []
    for i in range(3):
        x = numbers(0.1, i, g=True)
        y, r = c(x)
        y.backward()
        out.append((x.grad, r.g, r.n))
    return out


@program
def made_distribution(wrap):
    def f(x):
        d = torch.distributions.Normal(x, 1.0)
        return d, d.log_prob(x + 1)

    c = wrap(f)
    d, l = c(numbers(1.0, 2.0))
    d2, l2 = c(numbers(3.0, 4.0))
    return d.loc, d2.loc, l, l2, d2.scale


@program
def eff_catch_warnings_inside(wrap):
    def f(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            warnings.warn("a")
        return x * len(w)

    c = wrap(f)
    return [c(numbers(1.0)) for _ in range(3)]


@program
def eff_warnings_ignored(wrap):
    def f(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("quiet")
        return x * 2

    c = wrap(f)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = [c(numbers(1.0)) for _ in range(3)]
    return out, [str(w.message) for w in seen if w.category.__name__ != "ForegradWarning"]


@program
def code_replaced(wrap):
    def h(x):
        return x * 2

    def g(x):
        return x * 5

    c = wrap(lambda x: h(x))
    out = [c(numbers(1.0))]
    h.__code__ = g.__code__
    out.append(c(numbers(1.0)))
    return out


@program
def abc_register_later(wrap):
    class A(__import__("abc").ABC):
        pass

    class B:
        k = 3.0

    b = B()
    c = wrap(lambda x: x * b.k if isinstance(b, A) else x)
    out = [c(numbers(1.0))]
    A.register(B)
    out.append(c(numbers(1.0)))
    return out


@program
def globals_by_text(wrap):
    global GT_a, GT_b
    GT_a, GT_b = 1.0, 2.0
    st = {"n": "a"}
    c = wrap(lambda x: x * globals()["GT_" + st["n"]])
    out = [c(numbers(1.0))]
    st["n"] = "b"
    out.append(c(numbers(1.0)))
    GT_b = 8.0
    out.append(c(numbers(1.0)))
    return out


@program
def text_error_message(wrap):
    def f(x):
        if x.shape[0] % 2:
            raise ValueError(f"odd {x.shape[0]}")
        return x

    c = wrap(f)
    out = []
    for n in (2, 3, 4, 5, 7):
        try:
            out.append(c(torch.ones(n)))
        except ValueError as e:
            out.append(str(e))
    return out


@program
def bw_reads_global_ns(wrap):
    S.lam = 1.0

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * S.lam

    c = wrap(lambda x: G.apply(x).sum())
    out = []
    for i in range(3):
        x = numbers(1.0, g=True)
        y = c(x)
        S.lam = i + 2.0
        y.backward()
        out.append(x.grad)
    return out


@program
def hook_in_hook(wrap):
    st = []

    def f(x):
        y = x.exp()

        def outer(g):
            g2 = g * 2
            st.append(g2.clone())
            return g2

        y.register_hook(outer)
        z = y.sin()
        z.register_hook(lambda g: (st.append("z"), g)[1])
        return z.sum()

    c = wrap(f)
    out = []
    for i in range(3):
        x = numbers(0.1, i, g=True)
        c(x).backward()
        out.append(x.grad)
    return out, st


@program
def eff_deepcopy_state(wrap):
    st = {"l": [1.0, 2.0]}
    hist = []

    def f(x):
        hist.append(copy.deepcopy(st))
        st["l"].append(len(st["l"]) * 1.0)
        return x * sum(st["l"])

    c = wrap(f)
    return [c(numbers(1.0)) for _ in range(3)], hist


@program
def effect_then_raise(wrap):
    st = {"n": 0}

    def f(x):
        st["n"] += 1
        if x.sum() > 3:
            st["n"] += 10
            raise ValueError("x")
        return x * st["n"]

    c = wrap(f)
    out = []
    for v in (1.0, 5.0, 2.0, 7.0, 1.0):
        try:
            out.append(c(numbers(1.0, v)))
        except ValueError:
            out.append("E")
    return out, st


@program
def leaf_made_and_returned(wrap):
    def f(x):
        w = x.detach().requires_grad_()
        return w, (w * w).sum()

    c = wrap(f)
    out = []
    for i in range(3):
        w, l = c(numbers(1.0, i))
        l.backward()
        out.append((w.grad, w.is_leaf))
    return out


@program
def attr_of_result(wrap):
    def f(x):
        y = x * 2
        y.info = {"n": x.shape[0]}
        return y

    c = wrap(f)
    return [(y, y.info) for y in (c(torch.ones(n)) for n in (1, 2, 3))]


@program
def classes_made_by_calls(wrap):
    """What they are of is told by their module: `types`, or `abc`."""
    made = [
        dataclasses.make_dataclass("Config", [("rate", float)])(2.0),
        types.new_class("Config", (), {}, lambda body: body.update(rate=2.0))(),
        type("Config", (abc.ABC,), {"rate": 2.0})(),
    ]
    calls = [wrap(lambda x, config=config: x * config.rate) for config in made]
    found = [call(numbers(1.0)) for call in calls]
    for config in made:
        config.rate = 5.0
    return [*found, *(call(numbers(1.0)) for call in calls)]
