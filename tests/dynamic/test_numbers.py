"""Floats read from tensors, different in every call: one graph computes with them, exactly as Python does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import foregrad
from tests.parity.oracle import check


class Compiled:
    def __call__(self, fn):
        self.made = foregrad.compile(fn, backend="eager")
        return self.made

    @property
    def count(self):
        return len(self.made.foregrad.specializations)


def arguments():
    return (torch.rand(4).add(0.5).requires_grad_(),)


def scaled(x):
    return x * x.detach().sum().item()


def divided(x):
    return x / (x.detach().norm().item() + 1e-6) * 2, x.sum().item()


def from_the_left(x):
    n = x.detach().mean().item()
    return 2.0 - n, n * x, (1 - n) / x, -n + x, abs(n) + x, n // 0.1 * x, n**2 + x


def mixed(x):
    n, m = x.detach().sum().item(), x.detach().max().item()
    return x.addcmul(x, x, value=n), x.clamp(max=m), torch.where(x > 1, x, n), torch.full((2,), n * m), x > m


def written(x):
    y = x * 1
    y.mul_(x.detach().min().item()).add_(1)
    y[0].fill_(x.detach().max().item())
    return y


@pytest.mark.parametrize("fn", [scaled, divided, from_the_left, mixed, written])
def test_one_graph_serves_every_number(fn):
    compiled = Compiled()
    assert check(fn, arguments, calls=6, compile=compiled) == "equal"
    assert compiled.count == 1


def test_a_number_of_an_argument_is_a_part_of_the_program_until_it_differs():
    compiled = foregrad.compile(lambda x, scale: x * scale.item(), backend="eager")
    for number, graphs in [(2.0, 1), (2.0, 1), (3.0, 2), (4.0, 2), (5.0, 2)]:
        assert torch.equal(compiled(torch.ones(2), torch.tensor(number)), torch.ones(2) * number)
        assert len(compiled.foregrad.specializations) == graphs


def test_a_computed_number_that_does_not_vary_has_one_graph():
    scale = torch.tensor([0.5, -0.25])
    compiled = foregrad.compile(lambda x: x * scale.abs().max().item(), backend="eager")
    for i in range(4):
        x = torch.full((2,), float(i))
        assert torch.equal(compiled(x), x * 0.5)
    assert len(compiled.foregrad.specializations) == 1


def test_sizes_still_become_symbols_where_a_computed_number_is_needed_itself():
    def fn(x):
        loss = (x * x).mean()
        if not math.isfinite(loss.item()):
            raise ValueError
        return loss * round(loss.item(), 3)

    compiled = foregrad.compile(fn, backend="eager")
    for n in range(2, 9):
        x = torch.rand(n)
        assert torch.equal(compiled(x), fn(x))
    assert len(compiled.foregrad.specializations) == 2


def clipped(x):
    norm = x.detach().norm().item()
    if norm > 2.0:
        return x * (2.0 / (norm + 1e-6))
    return x * 1


def test_a_comparison_is_a_branch():
    compiled = Compiled()
    assert check(clipped, lambda: (torch.rand(4).mul(2).requires_grad_(),), calls=10, compile=compiled) == "equal"
    assert compiled.count <= 4


def asks_c(x):
    return x * math.sqrt(x.detach().sum().item())


def asks_backward(x):
    return x ** x.detach().mean().item()


def asks_kernel(x):
    n = x.detach().mean().item()
    return torch.add(x, x, alpha=n), x.lerp(x * 2, n), torch.tensor(n) * x


def asks_text(x):
    return f"{x.detach().sum().item():.2f}", str(x.sum().item()), x * 2


def asks_integer(x):
    return x * int(x.detach().sum().item()), round(x.detach().mean().item(), 2)


@pytest.mark.parametrize("fn", [asks_c, asks_backward, asks_kernel, asks_text, asks_integer])
def test_what_needs_the_number_itself_is_a_way_for_each(fn):
    assert check(fn, arguments, calls=5, compile=Compiled()) == "equal"


def test_a_traced_number_passes_for_a_float():
    def fn(x):
        n = x.sum().item()
        said = isinstance(n, float), isinstance(n, (int, str)), n != n, bool(n), n in (None, 0.0)
        assert said == (True, False, False, True, False)
        return x * n

    compiled = foregrad.compile(fn, backend="eager")
    for i in range(1, 4):
        x = torch.ones(2) * i
        assert torch.equal(compiled(x), x * x.sum())


def of_numpy(x):
    n, count = x.detach().mean().item(), (x > 1).sum().item()
    ratio = np.float64(0.5)
    return (
        np.mean([n, 0.5]),
        np.sum([n] * 9),
        n * ratio,
        np.abs(n),
        np.prod([count, 2]),
        count * np.int64(2),
        count > ratio,
    )


def test_numpy_gives_its_own_numbers():
    compiled = foregrad.compile(of_numpy, backend="eager")
    for x in torch.rand(4, 5).add(0.5):
        expected = of_numpy(x)
        found = compiled(x)
        assert [*map(type, found)] == [*map(type, expected)] and found == expected


def ramp_up(x, n, total):
    p = float(n) / total
    strength = 2.0 / (1.0 + np.exp(-10 * p)) - 1
    weight = float(np.exp(-5.0 * (1.0 - np.clip(n, 0.0, total) / total) ** 2))
    return x * strength * weight, strength, weight, np.cos(np.pi * n / total), np.sqrt(n) + np.float64(1)


def test_functions_of_numpy_take_numbers_that_vary():
    compiled = foregrad.compile(ramp_up, backend="eager", on_unsupported="raise")
    for n in range(2, 9):
        x = torch.rand(3)
        (product, *expected), (result, *found) = ramp_up(x, n, 40), compiled(x, n, 40)
        assert torch.equal(result, product) and [*map(type, found)] == [*map(type, expected)] and found == expected
    assert len(compiled.foregrad.specializations) == 2


@pytest.mark.parametrize(
    "function", [lambda n: int(np.arange(n).sum()), lambda n: np.exp(n).item(), lambda n: f"{np.exp(n)}"]
)
def test_what_numpy_gives_that_is_no_float_is_of_one_number(function):
    compiled = foregrad.compile(lambda x, n: (x * n, function(n)), backend="eager")
    for n in (2, 3, 4, 2):
        found = compiled(torch.ones(2), n)[1]
        assert type(found) is type(function(n)) and np.array_equal(found, function(n))


def test_numbers_and_changing_sizes_together():
    compiled = Compiled()
    makers = [lambda n=n: (torch.rand(n).requires_grad_(),) for n in (4, 6, 7, 5, 9)]
    assert check(lambda x: x * x.detach().sum().item() / x.shape[0], makers, calls=5, compile=compiled) == "equal"
    assert compiled.count == 2


def test_a_number_in_a_backward():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.sum().item()

    compiled = Compiled()
    assert check(lambda x: Scaled.apply(x) + 1, arguments, calls=5, compile=compiled) == "equal"
    assert compiled.count == 1


def of_tensors(x):
    t = x.detach().sum()
    return x * float(t) + math.sqrt(t) - math.hypot(t, 3), math.atan2(t, t)


def truncated(x):
    t = x.detach().sum() - 4
    return x * int(t * 3) + math.floor(t) - math.ceil(t), math.trunc(t.item()), round(t.item())


def of_a_parameter(x):
    return x / float(SCALE.detach())


def listed(x):
    a, b, c = x.detach()[:3].tolist()
    (d, _), (_, e) = (x.detach() * 100 - 100).long().view(2, 2).tolist()
    return x * a + b - c * d, e


def in_a_loop(x):
    for value in x.detach():
        x = x * float(value)
    return x, [int(value * 3) for value in x.detach()], [*map(float, x.detach())]


def an_index(x):
    first = int(x.detach().argmax())
    return x[: first + 1].sum(), x.narrow(0, first, 1), torch.zeros(first), torch.arange(first) * x.sum()


def a_flag(x):
    is_large = bool(x.detach().sum() > 4)
    return x * int(x.detach().sum() > 4), x * (3 if is_large else 2)


def at_least_one(x):
    return x / max(int((x > 1).sum()), 1)


def an_item(x):
    first = int(x.detach().argmax())
    return x[first] * x[-first - 1], x.view(2, 2)[:, first % 2], x.view(2, 2)[first // 2, first % 2], x[first:][0]


def an_item_is_set(x):
    y, first = x * 1, int(x.detach().argmax())
    y[first] = 2.0
    return y * x


def quotients(x):
    n, t = int(x.detach().sum() * 10), x.detach().sum().item()
    (a, b), (c, d), (e, f), (g, h) = divmod(n, 7), divmod(t, 0.3), divmod(n, -2.5), divmod(50, n)
    return x * a + b - c * d, x * e + f, x * g * h


def of_integers(x):
    n = int(x.detach().sum() * 10)
    return x * math.gcd(n, 12) + math.isqrt(n) - math.lcm(n, 4) * math.comb(n, 2), x * math.perm(n, 2)


def exact_sums(x):
    n = int(x.detach().sum() * 10)
    return x * math.fsum(x.tolist()) - math.fsum([n, x[0].item(), 0.1]), x * math.fsum((n, 2))


SCALE = torch.nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize(
    ("fn", "graphs"),
    [
        (of_tensors, 2),
        (truncated, 2),
        (listed, 2),
        (in_a_loop, 2),
        (an_index, 3),
        (a_flag, 3),
        (at_least_one, 3),
        (an_item, 3),
        (an_item_is_set, 3),
        (quotients, 2),
        (of_integers, 2),
        (exact_sums, 2),
    ],
)
def test_conversions_read_tensors_as_item_does(fn, graphs):
    compiled = Compiled()
    assert check(fn, arguments, calls=20, compile=compiled) == "equal"
    assert compiled.count <= graphs


def test_an_index_that_varies_is_an_argument():
    compiled = foregrad.compile(lambda x, n: x[n] * 2, backend="eager")
    for n in range(12):
        assert torch.equal(compiled(torch.arange(12.0), n), torch.tensor(n * 2.0))
    assert len(compiled.foregrad.specializations) <= 4
    for wrong in (12, -13):
        with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 12"):
            compiled(torch.arange(12.0), wrong)


def test_errors_of_functions_of_numbers_are_python_own():
    compiled = foregrad.compile(lambda x, n: x * (2 + math.isqrt(n.item())) + divmod(3, n.item())[0], backend="eager")
    for n in (4, 5, 6, 7):
        assert torch.equal(compiled(torch.ones(2), torch.tensor(n)), torch.ones(2) * (2 + math.isqrt(n)) + 3 // n)
    with pytest.raises(ZeroDivisionError):
        compiled(torch.ones(2), torch.tensor(0))
    with pytest.raises(ValueError, match="nonnegative"):
        compiled(torch.ones(2), torch.tensor(-1))
    with pytest.raises(TypeError):
        foregrad.compile(lambda x: divmod(x.sum().item(), "3"), backend="eager")(torch.ones(2))


def test_a_parameter_that_is_trained_is_converted():
    compiled = Compiled()(of_a_parameter)
    for value in range(2, 8):
        with torch.no_grad():
            SCALE.fill_(value / 4)
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2) / (value / 4))
    assert len(compiled.foregrad.specializations) == 2


def test_a_branch_on_a_number_is_on_its_truth():
    def fn(x):
        return x * 2 if x.detach().relu().sum() else x + 1

    compiled = Compiled()
    makers = [lambda i=i: ((torch.full((3,), float(i)).requires_grad_()),) for i in (-1, -2, 1, 2, 3, -3, 4)]
    assert check(fn, makers, calls=len(makers), compile=compiled) == "equal"
    assert compiled.count <= 3


def test_conversions_of_plain_values_are_python_own():
    def fn(x):
        assert (int("ff", 16), int("11", base=2), float("1e3"), int(True)) == (255, 3, 1e3, 1)
        assert type(int(3.5)) is int and float(2) == 2.0 and isinstance(1.5, float)
        with pytest.raises(ValueError, match="could not convert"):
            float("loss")
        return x * 2

    assert torch.equal(foregrad.compile(fn, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))


def test_a_tensor_of_several_elements_is_no_number():
    compiled = foregrad.compile(lambda x: x * float(x), backend="eager")
    with pytest.raises(ValueError, match="can be converted"):
        compiled(torch.ones(3))


def test_a_gradient_that_cannot_be_taken_with_symbols_has_a_graph_for_each_number():
    def fn(x):
        n = int(x.detach().sum())
        return x**n, x.sum()

    makers = [lambda n=n: (torch.tensor([1.0, n - 1]).requires_grad_(),) for n in (2, 3, 4, 3)]
    assert check(fn, makers, calls=4, compile=Compiled()) == "equal"
