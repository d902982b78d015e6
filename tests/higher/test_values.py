"""Derivatives whose own operators look at values: each way that these come out has a graph of its own."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedError

D = torch.float64


def three_orders(fn, *inputs):
    """Gradients of orders one to three, by all the inputs."""
    found = []
    value = (fn(*inputs) * 1.5).sum()
    for _ in range(3):
        gradients = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
        found += gradients
        value = sum((g * g + g).sum() for g in gradients)
        if not value.requires_grad:
            break
    return found


def same_as_eager(fn, compiled, *values):
    sides = []
    for side in (fn, compiled):
        sides.append(three_orders(side, *(v.clone().requires_grad_() for v in values)))
    assert all(t.isfinite().all() for t in sides[0])
    torch.testing.assert_close(sides[1], sides[0], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("native", [True, False])
def test_determinants_of_regular_and_singular_matrices_of_a_batch(native):
    """Which ones are singular differs from call to call."""
    torch.manual_seed(0)
    with foregrad.config.override(native=native):
        compiled = foregrad.compile(torch.linalg.det, backend="eager")
        regular = torch.randn(3, 3, 3, dtype=D)
        same_as_eager(torch.linalg.det, compiled, regular)
        for singular in (slice(0, 1), slice(1, 3), slice(0, 0)):
            batch = regular.clone()
            batch[singular] = torch.tensor([[1.0, 2, 3], [2, 4, 6.5], [0, 0, 0]], dtype=D)
            sides = []
            for side in (torch.linalg.det, compiled):
                x = batch.clone().requires_grad_()
                (first,) = torch.autograd.grad(side(x).sum(), x, create_graph=True)
                sides.append((first, *torch.autograd.grad(first.pow(2).sum(), x)))
            torch.testing.assert_close(sides[1], sides[0], rtol=1e-7, atol=1e-8)


def test_a_determinant_differentiated_inside():
    def f(x):
        return torch.autograd.grad(torch.det(x @ x.mT + torch.eye(3, dtype=D)), x, create_graph=True)[0]

    torch.manual_seed(0)
    same_as_eager(f, foregrad.compile(f, backend="eager"), torch.randn(3, 3, dtype=D))


REDUCTIONS = {
    "index_reduce": lambda x, s: x.index_reduce(0, torch.tensor([0, 0, 1, 3]), s, "prod"),
    "scatter_reduce": lambda x, s: x.scatter_reduce(0, torch.tensor([0, 0, 1, 3]), s, "prod"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_products_with_and_without_zeros(name):
    """Two zeros that meet in one product have no second derivative in eager."""
    fn = REDUCTIONS[name]
    compiled = foregrad.compile(fn, backend="eager")
    torch.manual_seed(0)
    x, source = torch.randn(4, dtype=D), torch.randn(4, dtype=D)
    sides = []
    for zeros in ((), (0,), (), (0, 1), (2,)):
        values = source.index_fill(0, torch.tensor(zeros, dtype=torch.long), 0.0)
        for side in (fn, compiled):
            a, b = (v.clone().requires_grad_() for v in (x, values))
            first = torch.autograd.grad(side(a, b).sum(), (a, b), create_graph=True)
            if len(zeros) == 2:
                with pytest.raises(RuntimeError, match="Double backward is unsupported"):
                    torch.autograd.grad(first[1].sum(), (a, b), materialize_grads=True)
            else:
                sides.append([*first, *torch.autograd.grad(first[0].sum() + first[1].sum(), (a, b))])
    torch.testing.assert_close(sides[1::2], sides[::2])


def test_more_ways_than_are_kept_raise():
    """A derivative that reads a number that differs each time."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            if torch.is_grad_enabled():
                return grad * x.cos() * x.sum().item()
            return grad * x.cos()

    compiled = foregrad.compile(Reads.apply, backend="eager")
    for i in range(16):
        x = torch.full((2,), float(i), dtype=D, requires_grad=True)
        (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        torch.testing.assert_close(first, x.cos() * 2 * i)
    x = torch.full((2,), 99.0, dtype=D, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"branches on values.*test_values.py"):
        torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
