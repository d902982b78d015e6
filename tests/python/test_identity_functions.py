"""Custom Functions that give back a view of all of their input, and whose backward no graph holds."""

import pytest
import torch

import foregrad
from tests.parity.oracle import check

SEEN = []


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        SEEN.append(gradient.sum().item())
        return gradient * 3


class Itself(Counted):
    @staticmethod
    def forward(ctx, x):
        return x


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return (-gradient if gradient.sum() > ctx.by else gradient * 2), None


class OfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.view_as(x), y * 2, y.view_as(y)

    @staticmethod
    def backward(ctx, a, b, c):
        SEEN.append(a.sum().item())
        return a * 3, b * 2 - c


def in_between(x):
    return (Counted.apply(x * 2) * x).sum()


def of_an_argument(x):
    return Counted.apply(x).sin()


def as_it_is(x):
    return Itself.apply(x * 2).sum(), x * 3


def by_a_number(x):
    return Branching.apply(x.sin(), 0.5) * 2


def of_two(x):
    a, b, c = OfTwo.apply(x.sin(), x.cos())
    return a * b + c


def of_a_part(x):
    return Counted.apply(x[1:]) * 2


def written_behind(x):
    y = x * 2
    z = Counted.apply(y)
    y.data.mul_(3)
    return z + 1


@pytest.mark.parametrize(
    "fn",
    [in_between, of_an_argument, as_it_is, by_a_number, of_two, of_a_part, written_behind],
    ids=lambda f: f.__name__,
)
def test_it_is_compiled(fn):
    made = []

    def compile(function):
        made.append(foregrad.compile(function, backend="eager", on_unsupported="raise"))
        return made[-1]

    SEEN.clear()
    assert check(fn, lambda: (torch.randn(4).requires_grad_(),), calls=3, compile=compile) == "equal"
    assert [len(list(one.foregrad.all_specializations())) for one in made] == [1]


def test_the_backward_runs_each_time():
    x = torch.ones(3, requires_grad=True)
    compiled = foregrad.compile(in_between, backend="eager", on_unsupported="raise")
    SEEN.clear()
    for i in range(3):
        compiled(x).backward()
        assert len(SEEN) == i + 1
    assert torch.equal(x.grad, torch.full((3,), 3 * (2.0 + 3 * 2.0)))
