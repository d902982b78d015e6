"""A backward inside a compiled function is a part of it: what a custom Function does there in Python too."""

from __future__ import annotations

import functools

import pytest
import torch

import foregrad
import foregrad.extend
from tests.covering import each

STATE = {"backwards": 0, "scale": 2.0}


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        STATE["backwards"] += 1
        return g * STATE["scale"]


class CountingWithNumPy(Counting):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.numpy() * 2)


class CountingByValue(Counting):
    @staticmethod
    def backward(ctx, g):
        STATE["backwards"] += 1
        return g * 2 if g.sum() > 0 else g


def reads_the_count(function, x):
    function.apply(x).sum().backward()
    return STATE["backwards"]


def reads_it_before_and_after(function, x):
    before = STATE["backwards"]
    (gradient,) = torch.autograd.grad(function.apply(x).sum(), x)
    return before, STATE["backwards"], gradient


def sets_the_scale(function, x):
    STATE["scale"] += 1
    function.apply(x * x).sum().backward()
    STATE["scale"] += 1
    return x.grad


def takes_a_gradient_outside_too(function, x):
    function.apply(x).sum().backward()
    return STATE["backwards"], function.apply(x).sum()


@pytest.mark.parametrize(
    ("step", "function", "door"),
    each(
        [reads_the_count, reads_it_before_and_after, sets_the_scale, takes_a_gradient_outside_too],
        [Counting, CountingWithNumPy, CountingByValue],
        [foregrad.compile, functools.partial(torch.compile, backend="foregrad")],
        times=2,
    ),
)
@pytest.mark.filterwarnings("ignore")
def test_state_that_a_backward_inside_writes_is_read_behind_it(step, function, door):
    def outcomes(of):
        STATE.update(backwards=0, scale=2.0)
        found = []
        for _ in range(3):
            x = torch.ones(2, requires_grad=True)
            results = of(function, x)
            last = results[-1] if isinstance(results, tuple) else None
            if last is not None and last.requires_grad:
                last.backward()
            found.append(repr((results[:-1] if last is not None else results, x.grad, STATE)))
        return found

    more = {"backend": "eager", "on_unsupported": "eager"}
    compiled = door(step, **(more if door is foregrad.compile else {"options": more}))
    assert outcomes(compiled) == outcomes(step)


def test_a_backward_inside_that_counts_needs_no_graph_for_each_count():
    compiled = foregrad.compile(reads_the_count, backend="eager", on_unsupported="raise")
    STATE["backwards"] = 0
    assert [compiled(Counting, torch.ones(2, requires_grad=True)) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert len(foregrad.extend.view(compiled).graphs) <= 3
