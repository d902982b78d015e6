"""Floats among the arguments: one graph for many of them where the program computes with them, else one for each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import foregrad
from tests.dynamic.test_shapes import Compiled
from tests.parity.oracle import check

VALUES = (0.1, 0.2, 0.3, 1.0, 0.0, -0.0, 2.5)


def expect(fn, graphs, values=VALUES, **settings):
    compiled = Compiled(**settings)
    makers = [lambda v=v: (torch.randn(3, 4).requires_grad_(), v) for v in values]
    assert check(fn, makers, calls=len(values), compile=compiled) == "equal"
    assert compiled.count == graphs


def a_step(x, rate):
    with torch.no_grad():
        momentum = x.exp() * 0.9
        p = x * 1
        p.add_(momentum, alpha=-rate).mul_(1 - rate * 0.01)
        return p.addcdiv_(momentum, x.exp().sqrt() + 1e-8, value=-rate)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s: x.sin() * s,
        lambda x, s: (x * (s * 2 + 1) / (s + 3)).tanh(),
        lambda x, s: x.mul(s).div(s + 3).sub(s),
        lambda x, s: (x + torch.full((4,), s)).sin(),
        lambda x, s: x.clamp(max=s),
        lambda x, s: F.leaky_relu(x, s),
        lambda x, s: torch.where(x > s, x, s),
        a_step,
        lambda x, s: x * math.sqrt(abs(s)) + math.atan2(s, 2) * math.cos(s),
        lambda x, s: x * (2 if type(s) is float else 3) * s,
        lambda x, s: x * torch.tensor(s) + torch.as_tensor([s, 1, 2 * s, 0.5]) + torch.tensor([s, 2.0, s, s])[:1],
        lambda x, s: x * max(s, -1.0) + min([s, 5.0]) * max(x.sum().item(), s),
        lambda x, s: x * (float("inf") > s) * sum([s, s]),
        lambda x, s: x * int(s * 10) + math.floor(s) + float(int(s)),
    ],
)
def test_one_graph_for_many(fn):
    expect(fn, 2)


def test_what_an_operator_asks_of_one_is_decided():
    fn = lambda x, s: torch.add(x, x.sin(), alpha=s) + torch.addmm(x @ x.T, x, x.T, beta=s, alpha=2 * s).sum()
    expect(fn, 2, values=(0.1, 0.2, 0.3, -2.5))
    expect(fn, 3, values=(0.1, 0.2, 1.0, 0.3, 1.0))  # whether it is one


def test_through_min_cut():
    expect(lambda x, s: (x.sin() * s).exp() * s, 2, partition="min_cut")


def test_never_when_told_so():
    expect(lambda x, s: x * s, 3, values=(0.1, 0.2, 0.3, 0.1), dynamic=False)


def test_an_exact_sum_is_in_the_graph():
    expect(lambda x, s: x * math.fsum([s, 0.1, s]), 2)


def test_a_branch_on_one_is_a_way():
    expect(lambda x, s: x * s if s > 0.25 else x + s, 3)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s: x * len(str(s)),
        lambda x, s: F.dropout(x, s),
        lambda x, s: x.abs() ** s,
    ],
)
def test_where_the_value_matters_each_gets_a_graph(fn):
    expect(fn, 4, values=(0.1, 0.2, 0.3, 0.5, 0.1, 0.2))


def test_one_that_is_returned_is_an_input():
    expect(lambda x, s: (x * s, s), 2, values=(0.1, 0.2, 0.3, 0.5, 0.1, 0.2))


def test_numbers_that_are_none_get_graphs_of_their_own():
    fn = foregrad.compile(lambda x, s: x * s, backend="eager")
    x = torch.ones(3)
    for s in (0.1, 0.2, math.nan, math.inf, 0.3, -math.inf, math.nan):
        torch.testing.assert_close(fn(x, s), x * s, rtol=0, atol=0, equal_nan=True)
    assert len(fn.foregrad.specializations) == 5


def test_together_with_sizes():
    fn = foregrad.compile(lambda x, s: (x * s).softmax(0) / x.shape[0], backend="eager")
    for n, s in ((2, 0.1), (3, 0.2), (4, 0.3), (9, 0.4)):
        x = torch.randn(n)
        assert torch.equal(fn(x, s), (x * s).softmax(0) / n)
    assert len(fn.foregrad.specializations) == 2


def test_derivatives_of_any_order():
    def function(x, s):
        return (x.sin() * s).exp() / (s + 4)

    fn = foregrad.compile(function, backend="eager")
    for s in (0.1, 0.2, 0.3):
        found = []
        for f in (function, fn):
            torch.manual_seed(0)
            x = torch.randn(5, requires_grad=True)
            grads = [f(x, s)]
            for _ in range(3):
                grads += torch.autograd.grad(grads[-1].exp().sum(), x, create_graph=True)
            found.append(grads)
        torch.testing.assert_close(*found)
    assert len(fn.foregrad.specializations) == 2


def test_the_report_leaves_them_out():
    fn = foregrad.compile(lambda x, s: x * s, backend="eager")
    fn(torch.ones(2), 0.1), fn(torch.ones(2), 0.2), fn(torch.ones(2), 0.3), fn(torch.ones(2).double(), 0.4)
    report = str(foregrad.explain_recompiles(fn))
    assert "not graph 2: x.dtype" in report
    assert "s was 0.2" not in report
