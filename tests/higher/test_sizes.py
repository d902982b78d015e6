"""Derivatives of any order of functions whose sizes, or numbers, vary from call to call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import UnsupportedError
from tests.higher.programs import laplacian, mlp

D = torch.float64
SIZES = (5, 7, 9, 12, 3)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def grads(output, inputs, order):
    """The output and its derivatives, each of the sum of the sines of the last."""
    found, last = [output], (output,)
    for _ in range(order):
        total = sum(t.sin().sum() for t in last)
        last = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
        found += last
    return found


def check(f, make, sizes=SIZES, order=3, partition="default", graphs=2):
    compiled = foregrad.compile(f, backend="eager", partition=partition)
    for number, size in enumerate(sizes):
        results = []
        for run in (f, compiled):
            torch.manual_seed(number)
            inputs = make(size)
            wanted = [x for x in inputs if x.requires_grad]
            results.append(grads(run(*inputs), wanted, order))
        for eager, found in zip(*results, strict=True):
            assert found.stride() == eager.stride()
            close(found, eager)
    if graphs is not None:
        assert len(compiled.foregrad.specializations) == graphs


def leaf(*shape):
    return torch.randn(*shape, dtype=D).requires_grad_()


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_pinn_with_a_varying_number_of_points(order):
    results = []
    for compile in (lambda f: f, lambda f: foregrad.compile(f, backend="eager")):
        torch.manual_seed(0)
        net = mlp(2, 8, 8, 1)
        run, found = compile(net), []
        for size in SIZES:
            x = torch.rand(size, 2, dtype=D).requires_grad_()
            u = run(x)[:, 0]
            if order == 1:
                residual = u
            else:
                residual = laplacian(u, x)
                if order == 3:
                    residual = torch.autograd.grad(residual.sum(), x, create_graph=True)[0]
            net.zero_grad()
            residual.pow(2).mean().backward()
            found += [residual.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
        results.append(found)
    for wanted, got in zip(*results, strict=True):
        close(got, wanted)


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_two_sizes_at_once(partition):
    def f(x, y, w):
        return ((x @ w) @ (y @ w).T).tanh().sum(1, keepdim=True) * x.cumsum(0).exp().mean()

    check(f, lambda n: (leaf(n, 3), leaf(2 * n - 1, 3), leaf(3, 4)), partition=partition)


def test_data_without_gradients_has_the_only_symbol():
    def f(data, w):
        return ((data @ w).sin() * data.sum(1, keepdim=True)).mean(0)

    check(f, lambda n: (torch.randn(n, 3, dtype=D), leaf(3, 2)))


def test_inputs_that_are_no_leaves_and_outputs_that_are_views():
    def f(x, w):
        return (x.T.reshape(-1)[: x.shape[0]] * w).exp().unsqueeze(0).expand(3, -1)

    def make(n):
        return (leaf(n, 4), leaf(1))

    base = foregrad.compile(f, backend="eager")
    for size in SIZES:
        results = []
        for run in (f, base):
            torch.manual_seed(size)
            x, w = make(size)
            results.append(grads(run(x.sin(), w * 2), [x, w], 3))
        for wanted, found in zip(*results, strict=True):
            close(found, wanted)


def test_sizes_in_the_arithmetic_and_in_branches():
    def f(x):
        n = x.shape[0]
        y = (x / n).pow(3) * (n + 0.5)
        return y.view(n // 2, 2, -1).sin() if n % 2 == 0 else y.view(-1).cumsum(0)

    check(f, lambda n: (leaf(n, 2),), sizes=(4, 6, 8, 5, 7, 9, 10), graphs=None)


def test_only_some_outputs_are_differentiated():
    def f(x, w):
        y = (x @ w).tanh()
        return y.sum(0), (y * y).mean(1)

    compiled = foregrad.compile(f, backend="eager")
    for size in SIZES:
        for which in (0, 1):
            results = []
            for run in (f, compiled):
                torch.manual_seed(size)
                x, w = leaf(size, 3), leaf(3, 2)
                results.append(grads(run(x, w)[which], [x, w], 2))
            for wanted, found in zip(*results, strict=True):
                close(found, wanted)


def test_a_number_that_is_another_at_every_call():
    def f(x, s):
        a = s.item()
        return (x * a).sin().pow(2) * (a + 1.5) / a

    compiled = foregrad.compile(f, backend="eager")
    for value, size in enumerate((3, 4, 5, 6, 7), 1):
        results = []
        for run in (f, compiled):
            torch.manual_seed(size)
            x, s = leaf(size), torch.tensor(value / 3, dtype=D)
            results.append(grads(run(x, s), [x], 3))
        for wanted, found in zip(*results, strict=True):
            close(found, wanted)


def test_a_derivative_that_needs_more_of_the_sizes_says_so_for_others():
    """A formula that asks for a number of its own: its graph is for that size alone."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return Deeper.apply(x) * g

    class Deeper(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.cos()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return -x.sin() * g * (2.0 if x.shape[0] < 8 else 3.0)

    compiled = foregrad.compile(Odd.apply, backend="eager")

    def second(run, size):
        x = torch.linspace(0, 1, size, dtype=D).requires_grad_()
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    for size in (4, 5, 6):
        assert torch.equal(second(compiled, size), second(Odd.apply, size))
    with pytest.raises(UnsupportedError, match="does not hold for the sizes"):
        second(compiled, 9)
    static = foregrad.compile(Odd.apply, backend="eager", dynamic=False)
    for size in (4, 9):
        assert torch.equal(second(static, size), second(Odd.apply, size))


def test_modules_with_norms():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2), nn.Softmax(-1)).to(D)
    check(net, lambda n: (leaf(n, 3),), order=2)


def test_an_integer_argument_that_varies():
    def cubes(x, n):
        return (x[:n] ** 3).sum()

    compiled = foregrad.compile(cubes, backend="eager")
    for n in (3, 4, 5, 6):
        x = torch.randn(8, dtype=torch.float64, requires_grad=True)
        found = []
        for function in (cubes, compiled):
            (first,) = torch.autograd.grad(function(x, n), x, create_graph=True)
            found.append(torch.autograd.grad(first.sum(), x)[0])
        assert torch.equal(*found)
    assert len(compiled.foregrad.specializations) == 2


def test_a_size_that_the_program_needs_to_know_later_on():
    def f(x, w, b):
        zeros = x.new_zeros(x.shape[0], 3)
        h = torch.nn.functional.softplus(zeros.index_add(0, torch.arange(x.shape[0]), x) @ w + b)
        return h.exp() * len([None for _ in range(x.shape[0])])

    check(f, lambda n: (leaf(n, 3), leaf(3, 2), leaf(2)), order=2, graphs=None)
