"""Integers among the arguments: one graph for many of them where the program computes with them, else one for each."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import foregrad
from tests.dynamic.test_shapes import Compiled
from tests.parity.oracle import check


def calls(*values, shape=(3, 9)):
    return [lambda n=n: (torch.randn(*shape).requires_grad_(), n) for n in values]


def expect(fn, values, graphs, **settings):
    compiled = Compiled(**settings)
    assert check(fn, calls(*values), calls=len(values) - 1, compile=compiled) == "equal"
    assert compiled.count == graphs
    return compiled.made


def cut(x, n):
    return (x[:, :n] * n).sum(1), torch.arange(n), x / (n + 1), n * 2, x.new_zeros(n, 2)


def test_one_graph_for_many():
    expect(cut, (3, 4, 5, 6, 7, 2, 8), 2)


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_through_both_partitioners(partition):
    compiled = foregrad.compile(cut, backend="eager", partition=partition)
    for n in (3, 4, 6, 8):
        x = torch.randn(3, 9, requires_grad=True)
        expected, actual = cut(x, n), compiled(x, n)
        for a, b in zip(expected, actual, strict=True):
            torch.testing.assert_close(a, b)
        losses = [out[0].sum() + out[2].sum() for out in (expected, actual)]
        torch.testing.assert_close(*[torch.autograd.grad(loss, x)[0] for loss in losses])
    assert len(compiled.foregrad.specializations) == 2


def test_zero_one_and_less_get_graphs_of_their_own():
    expect(lambda x, n: x * n, (3, 4, 1, 0, -2, 5, 1, -2), 5)


def test_negative_integers_share_a_graph():
    expect(lambda x, n: x * n + x[:, :n].sum(), (-3, -4, -5, -2, -3), 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, given: x[:, torch.tensor(given)].sum(),
        lambda x, given: sum(x * (1 - done) for done in given),
        lambda x, given: x * sum(given) + x[:, given[0] : given[1] + 1].sum(),
    ],
)
def test_zeros_and_ones_in_a_list_need_no_graphs_of_their_own(use):
    given = [[i // 8 % 2, i // 4 % 2, i // 2 % 2, i % 2] for i in (5, 10, 7, 8, 0, 15, *range(16))] + [[2, 4, 0, 3]]
    compiled = Compiled()
    made = [lambda ints=ints: (torch.randn(3, 9).requires_grad_(), list(ints)) for ints in given]
    assert check(use, made, calls=len(made) - 1, compile=compiled) == "equal"
    assert compiled.count <= 5


def test_never_when_told_so():
    expect(cut, (3, 4, 5), 3, dynamic=False)


def test_together_with_sizes():
    compiled = Compiled()
    made = [lambda n=n: (torch.randn(2, n).requires_grad_(), n) for n in (4, 5, 6, 9)]
    assert (
        check(lambda x, n: (x[:, : n - 1] * n).sum(0) + torch.arange(n - 1), made, calls=3, compile=compiled) == "equal"
    )
    assert compiled.count == 2


def test_a_branch_on_one_is_a_guard():
    made = expect(lambda x, n: x[:, :n] if n > 4 else x * n, (3, 4, 2, 6, 7, 8, 3), 3)
    assert "n was" in str(foregrad.explain_recompiles(made))


def test_where_the_value_matters_each_gets_a_graph():
    expect(lambda x, n: {str(n): x + 1, f"{n + 1}": x}, (3, 4, 5), 3)
    expect(lambda x, n: sum(x * i for i in range(n)), (3, 4, 5), 3)
    expect(lambda x, n: x.sum(n % 2), (2, 3, 4), 3)
    expect(lambda x, n: x * {3: 1.5, 4: 2.5, 5: 0.5}[n], (3, 4, 5), 3)


def test_it_says_that_it_is_an_integer():
    expect(lambda x, n: x * n if isinstance(n, int) and isinstance(n + 1, int) else x, (3, 4, 5, 6), 2)
    expect(lambda x, n: x * 2 if type(n) is int else x * 3, (3, 4, 5, 6), 2)


def test_floats_that_are_computed_of_it_are_pythons():
    expect(lambda x, n: (x * math.cos(math.pi * n / 7), 0.9**n, n**-2, n / 3 + n, (n + 0.5) // 0.3), (3, 4, 5, 6), 2)
    expect(lambda x, n: x * (1.5 if n / 3 < n else 2.5) + round(n / 100) + int(n * 0.01), (3, 4, 5, 6), 2)


def test_bits_and_division_are_pythons():
    expect(lambda x, n: (x * (n // 2) + n % 3, x * (n / 3)), (3, 4, 5, 7), 2)
    expect(lambda x, n: x * (n // 2) + n % 3, (3, 4, 5, 7, 11), 2)


def test_the_report_says_what_the_graph_is_not_right_for():
    made = expect(cut, (3, 4, 5, 1), 3)
    made(torch.randn(3, 9, dtype=torch.float64), 6)
    report = str(foregrad.explain_recompiles(made))
    assert "n was 3, is 4" in report
    assert "n was from 2 to 9, is 1" in report
    assert "x.dtype was torch.float32, is torch.float64" in report.split("graph 4:")[1]


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, step):
        return self.linear(x) * step, x.new_full((2,), step)


def test_a_step_number_of_a_module():
    module = Steps()
    compiled = foregrad.compile(module, backend="eager")
    for step in range(12):
        x = torch.randn(2, 4)
        for a, b in zip(module(x, step), compiled(x, step), strict=True):
            assert torch.equal(a, b)
    assert len(compiled.foregrad.specializations) == 4  # 0, 1, 2 and all others


def test_text_of_the_graph_leaves_it_open():
    compiled = foregrad.compile(cut, backend="eager")
    for n in (3, 4):
        compiled(torch.randn(3, 9), n)
    for specialization in compiled.foregrad.specializations:
        str(specialization.product.captured.joint)
        specialization.source()
    compiled(torch.randn(3, 9), 6)
    assert len(compiled.foregrad.specializations) == 2


def test_a_branch_that_needs_the_value_leaves_the_others_open():
    def f(x, n):
        return x * len(str(n)) if n % 3 == 0 else x * n

    expect(f, (4, 6, 7, 8, 10, 11), 3)


CONDITIONS = {
    "is True": lambda x, flag: x * 2 if flag is True else x,
    "its type": lambda x, flag: x * 2 if type(flag) is bool else x,
    "a result": lambda x, flag: (x, flag),
    "a key": lambda x, flag: x * {True: 2.0, False: 3.0}[flag],
    "text": lambda x, flag: (x, f"{flag}"),
    "a tensor": lambda x, flag: x + torch.tensor(flag),
}


@pytest.mark.parametrize("use", CONDITIONS)
def test_a_condition_on_a_number_is_a_bool(use):
    """Whoever keeps it may ask for the very object: `flag is True`."""
    function = lambda x, n: CONDITIONS[use](x, n % 5 == 0)
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for n in range(3, 23):
        assert str(compiled(torch.ones(2), n)) == str(function(torch.ones(2), n))
    assert len(foregrad.explain_recompiles(compiled)) <= 3


def test_steps_that_wait_for_values_share_a_graph():
    """Two flags change at two values of a counter: the values between share a graph for each setting of the flags."""

    def training(compile):
        state = SimpleNamespace(step=0, warm=True, frozen=False)

        def step(x):
            state.step += 1
            if state.step == 6:
                state.warm = False
            if state.step == 11:
                state.frozen = True
            y = x.sin() if state.warm else x.cos()
            return y.detach() if state.frozen else y * state.step

        step = compile(step)
        results = [step(torch.arange(3.0) + i) for i in range(40)]
        return step, torch.stack(results), vars(state)

    compiled, results, state = training(partial(foregrad.compile, backend="eager", on_unsupported="raise"))
    _, expected, expected_state = training(lambda step: step)
    assert torch.equal(results, expected) and state == expected_state
    assert len(compiled.foregrad.specializations) <= 6
