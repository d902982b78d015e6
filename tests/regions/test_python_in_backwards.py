"""What custom Functions do in Python while their backward runs is done in each backward, as in eager."""

from __future__ import annotations

import contextlib
import importlib
import sys

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning

LOG: list = []
STATE = {"calls": 0, "last": None, "scale": 1.0}


class Counts(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        Counts.calls += 1
        STATE["calls"] += 1
        return g * ctx.saved_tensors[0].cos()


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, g):
        LOG.append(g.detach().norm().item())
        STATE["last"] = g.detach()
        return g * ctx.scale, None


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * STATE["scale"] if g.abs().max() > 0.5 else g * 2


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, g, h):
        LOG.append(("two", ctx.needs_input_grad, g is None, h is None))
        x, y = ctx.saved_tensors
        return g * y + h, g * x + h


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return Keeps.apply(Counts.apply(self.linear(x)).relu(), 2.0)


PROGRAMS = {
    "counts": lambda: lambda x: Counts.apply(x * 2).sum(),
    "keeps": lambda: lambda x: Keeps.apply(x.sin(), 3.0).exp().sum(),
    "reads": lambda: lambda x: Reads.apply(x.sin()).exp().sum(),
    "both": lambda: lambda x: Reads.apply(Counts.apply(x) * 2).sum() + Keeps.apply(x, 0.5).sum(),
    "two results": lambda: lambda x: sum(t.sum() for t in Two.apply(x.sin(), x.cos())),
    "one of two results": lambda: lambda x: Two.apply(x.sin(), x.detach())[0].sum(),
    "a module": lambda: Layer(),
    "in a loop": lambda: lambda x: Counts.apply(Counts.apply(Counts.apply(x))).sum(),
}


def steps(make, wrap):
    LOG.clear()
    Counts.calls = 0
    STATE.update(calls=0, last=None, scale=1.0)
    function = make()
    call = wrap(function)
    found = []
    for i in range(6):
        x = (torch.arange(3.0) / 4 + i).requires_grad_()
        STATE["scale"] = 1.0 + i
        loss = call(x).sum()
        if i == 4:
            loss.backward(retain_graph=True)
        if i != 2:
            loss.backward()
        last = STATE["last"]
        found.append((loss.item(), x.grad, list(LOG), Counts.calls, STATE["calls"], None if last is None else last + 0))
        if isinstance(function, nn.Module):
            found.append([p.grad for p in function.parameters()])
            function.zero_grad()
    return found, call


def same(a, b):
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name):
    expected, _ = steps(PROGRAMS[name], lambda f: f)
    found, call = steps(PROGRAMS[name], lambda f: foregrad.compile(f, backend="eager"))
    assert same(found, expected)
    assert len(foregrad.explain_recompiles(call)) == 1


def test_one_that_is_differentiated_twice_is_a_region_no_more():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            LOG.append(1)
            return g * ctx.saved_tensors[0].cos()

    def f(x):
        return Twice.apply(x).sum()

    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    x = torch.arange(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(gradient, x.cos())
    with pytest.raises(foregrad.errors.UnsupportedOpError, match="from now on calls like this run eagerly"):
        torch.autograd.grad(compiled(x), x, create_graph=True)[0].sum().backward()
    with pytest.warns(foregrad.errors.ForegradWarning, match="the backward of `f` changes LOG"):
        (gradient,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.equal(second, -x.sin())


PACKAGE = """
import torch

RATES = {"slow": 0.5, "fast": 2.0}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, done):
        ctx.name = name
        return done(x)

    @staticmethod
    def backward(ctx, g):
        return g * RATES[ctx.name], None, None


def scaled(x, name):
    return Scaled.apply(x, name, lambda value: value * RATES[name])
"""


@pytest.mark.parametrize("folder", ["site-packages", "sources"])
def test_a_table_that_a_backward_reads_is_a_constant_if_it_is_of_an_installed_package(folder, tmp_path, monkeypatch):
    """As of solvers, whose backwards look their methods up. Between two calls a change of it is seen, as of any other."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "rates.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.delitem(sys.modules, "rates", raising=False)
    rates = importlib.import_module("rates")
    function = foregrad.compile(lambda x: rates.scaled(x, "fast").sum(), backend="eager", on_unsupported="eager")
    is_installed = folder == "site-packages"
    with contextlib.nullcontext() if is_installed else pytest.warns(ForegradWarning, match="the call makes"):
        for rate in (2.0, 2.0, 3.0):
            rates.RATES["fast"] = rate
            x = torch.ones(3, requires_grad=True)
            function(x).backward()
            assert x.grad.tolist() == [rate] * 3
    assert bool(len(foregrad.explain_recompiles(function))) == is_installed


class Surrogate(torch.autograd.Function):
    slope = 10.0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, g):
        return g / (Surrogate.slope * ctx.saved_tensors[0].abs() + 1) ** 2


class Spiking(nn.Module):
    """A neuron with its potential as an attribute, which it writes before it spikes."""

    def __init__(self):
        super().__init__()
        self.layer, self.potential = nn.Linear(4, 4), None

    def forward(self, x):
        self.potential = self.layer(x)
        return Surrogate.apply(self.potential)


def test_a_number_of_the_class_is_part_of_the_graph_until_it_is_set(monkeypatch):
    model = Spiking()
    compiled = foregrad.compile(model, backend="eager", on_unsupported="raise")
    for slope in (10.0, 10.0, 3.0, 10.0):
        monkeypatch.setattr(Surrogate, "slope", slope)
        x = torch.randn(3, 4)
        expected, found = (torch.autograd.grad(call(x).sum(), model.layer.weight) for call in (model, compiled))
        assert torch.equal(*expected, *found)
    assert 1 <= len(foregrad.explain_recompiles(compiled)) <= 3
