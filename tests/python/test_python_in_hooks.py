"""What hooks on a function's own tensors do in Python is done in each backward, as in eager."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import UnsupportedOpError

LOG: list = []
STATE: dict = {}
CALLS = 0


def counts(gradient):
    global CALLS
    CALLS += 1
    STATE["last"] = gradient.norm()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)
        self.calls, self.norms, self.last = 0, [], None

    def forward(self, x):
        hidden = self.first(x).relu()
        hidden.register_hook(self.keep)
        hidden.register_hook(lambda gradient: self.norms.append(gradient.norm().item()))
        return self.second(hidden)

    def keep(self, gradient):
        self.calls += 1
        self.last = gradient


class Probe:
    def __init__(self):
        self.seen = LOG

    def named(self, name):
        def hook(gradient):
            self.seen.append((name, gradient.detach().clone()))

        return hook


def hooked(hook):
    def function(x):
        hidden = x.sin()
        hidden.register_hook(hook)
        return (hidden * 2).cos().sum()

    return function


def in_place(gradient):
    LOG.append(gradient.sum().item())
    gradient.mul_(2)


def branches(gradient):
    return gradient * 0.5 if gradient.norm() > 0.9 else None


def to_numpy(gradient):
    LOG.append(gradient.numpy().copy().tolist())


def prints(gradient):
    print("norm", gradient.norm().item())


def clips(gradient):
    LOG.append(1)
    return gradient.clamp(-0.1, 0.1)


def raises_later(gradient):
    if len(LOG) > 1:
        raise KeyError("enough")
    LOG.append(gradient)


def closed_over():
    log = LOG

    def function(x):
        hidden = x.sin()
        hidden.register_hook(lambda gradient: log.append(gradient))
        return (hidden * 2).cos().sum()

    return function


def of_an_object():
    probe = Probe()

    def function(x):
        first = x.sin()
        first.register_hook(probe.named("first"))
        second = first * x
        second.register_hook(probe.named("second"))
        return second.cos().sum()

    return function


def on_a_result():
    def function(x):
        hidden = x.sin()
        hidden.register_hook(lambda gradient: LOG.append(gradient))
        return hidden, (hidden * 2).cos().sum()

    return lambda x: sum(result.sum() for result in function(x))


def with_a_method():
    return Net()


PROGRAMS = {
    "a global and a dict": lambda: hooked(counts),
    "a list": lambda: hooked(lambda gradient: LOG.append(gradient)),
    "a list closed over": closed_over,
    "an object": of_an_object,
    "a module": with_a_method,
    "in place": lambda: hooked(in_place),
    "a branch": lambda: hooked(branches),
    "numpy": lambda: hooked(to_numpy),
    "prints": lambda: hooked(prints),
    "another gradient": lambda: hooked(clips),
    "a result": on_a_result,
    "raises": lambda: hooked(raises_later),
}


def steps(make, wrap, capsys):
    global CALLS
    LOG.clear()
    STATE.clear()
    CALLS = 0
    function = make()
    call, found = wrap(function), []
    for i in range(4):
        x = (torch.arange(3.0) / 4 + i).requires_grad_()
        loss = call(x).sum()
        try:
            loss.backward(retain_graph=i == 1)
            if i == 1:
                loss.backward()
        except KeyError as error:
            found.append(str(error))
        found += [loss.item(), x.grad, list(LOG), {**STATE}, CALLS, capsys.readouterr().out]
        if isinstance(function, nn.Module):
            found += [function.calls, list(function.norms), function.last, [p.grad + 0 for p in function.parameters()]]
    return found, call


def same(a, b):
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks_do_what_they_do_in_eager(name, capsys):
    expected, _ = steps(PROGRAMS[name], lambda function: function, capsys)
    found, call = steps(PROGRAMS[name], lambda function: foregrad.compile(function, backend="eager"), capsys)
    assert same(found, expected)
    if name != "a result":  # a lambda around what is compiled says nothing of it
        said = foregrad.explain_recompiles(call)
        assert said.eager_calls == 0
        assert len(said) == 1


@pytest.mark.filterwarnings("ignore")
def test_what_a_hook_keeps_stays_as_it_is_with_inductor():
    found = []
    for wrap in (lambda function: function, lambda function: foregrad.compile(function, backend="inductor")):
        LOG.clear()
        call = wrap(of_an_object())
        for i in range(3):
            call((torch.arange(3.0) / 4 + i).requires_grad_()).backward()
        found.append(list(LOG))
    for (name, one), (other_name, other) in zip(*found, strict=True):
        assert name == other_name
        assert torch.allclose(one, other)


@pytest.mark.parametrize(
    "hook", [lambda gradient: (LOG.append(1), 3)[1], lambda gradient: (LOG.append(1), gradient[:1])[1]]
)
def test_what_is_no_gradient_is_an_error_as_in_eager(hook):
    for wrap in (lambda function: function, lambda function: foregrad.compile(function, backend="eager")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((TypeError, RuntimeError), match="hook"):
                wrap(hooked(hook))(torch.ones(3, requires_grad=True)).backward()


def test_a_hook_that_is_differentiated_is_named_and_then_runs_eagerly():
    def make():
        def function(x):
            hidden = x.sin()
            hidden.register_hook(lambda gradient: LOG.append(gradient))
            return (hidden * 2).cos().sum()

        return function

    x = torch.ones(3, requires_grad=True)
    call = foregrad.compile(make(), backend="eager")

    def twice(function):
        (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
        return torch.autograd.grad(gradient.sum(), x)[0]

    with pytest.raises(UnsupportedOpError, match=r"registered at .* is differentiated"):
        twice(call)
    again = foregrad.compile(make(), backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(twice(again), twice(make()))


def test_a_hook_that_holds_what_the_call_makes_runs_eagerly():
    def function(x):
        hidden = x.sin()
        hidden.register_hook(lambda gradient: LOG.append((gradient * hidden).sum().item()))
        return hidden.cos().sum()

    LOG.clear()
    call = foregrad.compile(function, backend="eager", on_unsupported="eager")
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(foregrad.errors.ForegradWarning):
        call(x).backward()
    function(x).backward()
    assert len(LOG) == 2
    assert LOG[0] == LOG[1]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no backward here")


def test_a_forward_draws_nothing_of_a_backward_that_raises():
    def function(x):
        hidden = Raises.apply(x) * 2
        hidden.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
        return hidden.sin()

    for call in (function, foregrad.compile(function, backend="eager", on_unsupported="raise")):
        x = torch.ones(3, requires_grad=True)
        result = call(x)
        assert torch.equal(result, (x * 2).sin())
        with pytest.raises(RuntimeError, match="no backward here"):
            result.sum().backward()


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("holds", ["a variable", "a default", "an object"])
def test_a_number_that_a_hook_holds_is_that_of_the_call(holds, kind):
    def function(x, scale):
        y = x * 2
        number = scale.item()
        box = type("Box", (), {})()
        box.number = number
        if holds == "a variable":
            y.register_hook(lambda gradient: gradient * number)
        elif holds == "a default":
            y.register_hook(lambda gradient, number=number: gradient * number)
        else:
            y.register_hook(lambda gradient: gradient * box.number)
        return y

    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for value in (2, 3, 4, 5):
        x = torch.ones(3, requires_grad=True)
        compiled(x, torch.tensor(kind(value))).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0 * value))
    assert len(foregrad.explain_recompiles(compiled)) == 2


def test_a_number_that_a_hook_holds_behind_dynamo():
    torch._dynamo.reset()
    options = {"scale": 1.0}

    def function(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient * options["scale"])
        return y

    compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"})
    for value in (1.0, 2.0, 3.0, 4.0):
        options["scale"] = value
        x = torch.ones(3, requires_grad=True)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0 * value))
