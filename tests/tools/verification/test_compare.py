"""Distances, and what is rounding and what is wrong."""

from __future__ import annotations

import math

import pytest
import torch

from foregrad.tools.verification.compare import Exact, Verdict, compare, same_bits, ulps_between


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ulps_count_the_numbers_in_between(dtype):
    x = torch.tensor([1.0, -1.0, 0.0, 3.0], dtype=dtype)
    y = x.clone()
    for steps in range(1, 4):
        y = torch.nextafter(y, torch.full_like(y, math.inf)) if dtype not in (torch.float16, torch.bfloat16) else y
        if dtype in (torch.float16, torch.bfloat16):
            y = (y.view(torch.int16) + torch.tensor([1, -1, 1, 1], dtype=torch.int16)).view(dtype)
        assert ulps_between(x, y).tolist() == [steps] * 4


def test_ulps_across_zero_and_of_what_is_no_number():
    tiny = 2.0**-149
    pairs = ([tiny, 0.0, math.nan, math.inf], [-tiny, -0.0, 1.0, 1.0])
    assert ulps_between(*map(torch.tensor, pairs)).tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], True),
        ([0.0], [-0.0], False),
        ([1.0], [1.0 + 2**-23], False),
        ([1.0 + 1j], [1.0 + 1j], True),
    ],
)
def test_bits(left, right, same):
    assert same_bits(torch.tensor(left), torch.tensor(right)) is same


def exact_of(function, *args, shake=0.0):
    value = function(*(a.double() for a in args))
    return Exact(value, value * (1 + shake))


def test_another_order_of_summation_is_rounding_and_a_wrong_sum_is_not():
    torch.manual_seed(0)
    x = torch.randn(1000)
    expected, other = x.sum(), x.flip(0).double().sum().float()
    exact = Exact(x.double().sum(), (x.double() * (1 + 2**-23 * (torch.rand(1000) - 0.5))).sum())
    assert compare(other, expected, lambda: exact).verdict <= Verdict.ROUNDING
    assert compare(expected * (1 + 1e-4), expected, lambda: exact).verdict is Verdict.WRONG


def test_the_worst_element_is_named():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y = x.clone()
    y[1, 0] = 3.5
    gap = compare(y, x, lambda: exact_of(lambda a: a, x))
    assert (gap.verdict, gap.index, gap.expected, gap.actual, gap.exact) == (Verdict.WRONG, (1, 0), 3.0, 3.5, 3.0)
    assert gap.count == 1
    assert "at [1, 0]" in str(gap)


def test_a_nan_or_an_infinity_that_eager_does_not_have_is_wrong():
    x = torch.tensor([1.0, 2.0])
    for bad in (math.nan, math.inf):
        assert compare(torch.tensor([1.0, bad]), x, lambda: exact_of(lambda a: a, x)).verdict is Verdict.WRONG


def test_an_infinity_of_the_narrow_type_is_eagers_word():
    x = torch.tensor([300.0], dtype=torch.float16)
    expected = x * x
    exact = exact_of(lambda a: a * a, x)
    assert compare(expected.clone(), expected, lambda: exact).verdict is Verdict.EQUAL
    assert compare(torch.tensor([60000.0], dtype=torch.float16), expected, lambda: exact).verdict is Verdict.WRONG


def test_a_choice_that_float64_makes_otherwise_is_rounding():
    expected, actual = torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3])
    unsettled = Exact(torch.tensor([1, 0, 3]), torch.tensor([1, 0, 3]))
    settled = Exact(expected, expected)
    assert compare(actual, expected, lambda: unsettled).verdict is Verdict.ROUNDING
    assert compare(actual, expected, lambda: settled).verdict is Verdict.WRONG


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float64), None, 1.0])
def test_another_kind_is_wrong(other):
    assert compare(other, torch.ones(2)).verdict is Verdict.WRONG
