"""Functions that ask whether two objects are one: told apart by a guard."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.python.code import names_of
from foregrad.tracing import capture

KNOWN = torch.ones(3)
OTHER = torch.zeros(3)


def doubles_the_known(x):
    return x * 2 if x is KNOWN else x * 3


def compares_globals(x):
    return x * 2 if OTHER is KNOWN else x * 3


def uses_the_known(x):
    return x * 2 + KNOWN if x is KNOWN else x * 3 + KNOWN


@pytest.mark.parametrize("function", [doubles_the_known, uses_the_known])
@pytest.mark.parametrize("known_first", [True, False])
def test_an_argument_that_the_function_also_finds(function, known_first):
    compiled = foregrad.compile(function)
    calls = [KNOWN, torch.randn(3), KNOWN, torch.randn(3), torch.ones(3)]
    for x in calls if known_first else calls[1:]:
        assert torch.equal(compiled(x), function(x))


def test_what_stands_under_a_name_is_looked_up_again(monkeypatch):
    compiled = foregrad.compile(doubles_the_known)
    known, replaced, x = KNOWN, torch.ones(3), torch.randn(3)
    for value in (known, replaced, known):
        monkeypatch.setitem(globals(), "KNOWN", value)
        for argument in (x, known, replaced):
            assert torch.equal(compiled(argument), doubles_the_known(argument))


def test_two_names_come_to_stand_for_one_tensor(monkeypatch):
    compiled = foregrad.compile(compares_globals)
    x = torch.randn(3)
    for value in (OTHER, KNOWN, torch.ones(3), KNOWN):
        monkeypatch.setitem(globals(), "OTHER", value)
        assert torch.equal(compiled(x), compares_globals(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.weight = self.inner.weight

    def forward(self, x):
        return self.inner(x) if self.weight is self.inner.weight else -self.inner(x)


def test_parameters_that_are_no_longer_tied():
    model, x = Tied(), torch.randn(2, 3)
    compiled = foregrad.compile(model)
    assert torch.equal(compiled(x), model(x))
    tied = model.weight
    for weight in (nn.Parameter(torch.zeros(3, 3)), tied):
        model.weight = weight
        assert torch.equal(compiled(x), model(x))


def test_a_parameter_passed_and_compared():
    model = nn.Linear(3, 3)

    def f(p):
        return p * 2 if p is model.weight else p * 3

    compiled, other = foregrad.compile(f), torch.randn(3, 3)
    for p in (other, model.weight, other):
        assert torch.equal(compiled(p), f(p))
    model.weight = nn.Parameter(other.clone())
    for p in (other, model.weight, other):
        assert torch.equal(compiled(p), f(p))


def test_functional_call_of_a_module_that_compares_other_things():
    class Other(nn.Linear):
        def forward(self, x):
            y = x
            return super().forward(x) if x is y else x

    model, x = Other(3, 3), torch.randn(2, 3)

    def f(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    parameters = dict(model.named_parameters())
    assert torch.equal(foregrad.compile(f)(parameters, x), f(parameters, x))


def constant(x):
    return x is None, x is not None, x is ..., type(x) is int, x.__class__ is int


def of_a_global(x):
    return x is nn.Linear


def by_id(x, seen):
    return id(x) in seen


def of_attributes(a, b):
    return a.weight is b.weight


def test_what_counts_as_a_comparison():
    assert not names_of(constant.__code__).compares
    assert names_of(of_a_global.__code__).compares == {("nn", "Linear")}
    assert names_of(by_id.__code__).compares == {()}
    assert names_of(of_attributes.__code__).compares == {()}


def looks_up(weight, x):
    return (x @ weight).sin() if weight in dict.fromkeys(MODEL.parameters()) else x.cos()


def calls_with_parameters(weight, x):
    return torch.func.functional_call(MODEL, {"weight": weight}, (x,))


MODEL = nn.Linear(3, 3, bias=False)


def counted(monkeypatch, method):
    """The calls of a method of captures."""
    calls, original = [], getattr(capture.CaptureRun, method)
    monkeypatch.setattr(capture.CaptureRun, method, lambda *args: calls.append(1) or original(*args))
    return calls


@pytest.mark.parametrize(("function", "runs"), [(looks_up, 2), (calls_with_parameters, 1)])
def test_a_capture_that_looks_up_an_argument_runs_to_its_end_once(function, runs, monkeypatch):
    began, ended = counted(monkeypatch, "_called"), counted(monkeypatch, "_captured")
    compiled = foregrad.compile(function, backend="eager")
    x = torch.randn(3, 3, requires_grad=True)
    for weight in (MODEL.weight, nn.Parameter(torch.randn(3, 3))):
        for _ in range(2):
            out, expected = compiled(weight, x), function(weight, x)
            assert torch.equal(out, expected)
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
        if weight is MODEL.weight:
            assert (len(began), len(ended)) == (runs, 1)
