"""`.grad` of what a function makes and returns: refused, and looked for without giving a view another history."""

from __future__ import annotations

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedSideEffectError


def a_leaf(x):
    y = x.detach().clone().requires_grad_()
    (y * 2).sum().backward()
    return y


def a_view_that_is_a_leaf(x):
    y = x.detach()[0].requires_grad_()
    (y * 2).sum().backward()
    return y


def one_that_retains_it(x):
    y = x.detach().clone().requires_grad_() * 2
    y.retain_grad()
    y.sum().backward()
    return y


def a_view_that_retains_it(x):
    y = (x.detach().clone().requires_grad_() * 2)[0]
    y.retain_grad()
    y.sum().backward()
    return y


def assigned(x):
    y = x.detach()[0]
    y.grad = torch.ones_like(y)
    return y


def assigned_to_a_view_of_what_is_written(x):
    y = x.detach().clone()
    v = y[0]
    y.mul_(2)
    v.requires_grad_()
    v.grad = torch.ones_like(v)
    return v


@pytest.mark.parametrize(
    "function",
    [
        a_leaf,
        a_view_that_is_a_leaf,
        one_that_retains_it,
        a_view_that_retains_it,
        assigned,
        assigned_to_a_view_of_what_is_written,
    ],
)
def test_a_result_with_a_gradient_is_refused(function):
    assert function(torch.ones(2, 3)).grad is not None
    with pytest.raises(UnsupportedSideEffectError, match=r"`\.grad` of the result out"):
        foregrad.compile(function, backend="eager")(torch.ones(2, 3))


def a_view(x):
    return (x * 2)[0]


def a_view_of_what_is_written(x):
    y = x * 2
    v = y[0]
    y.mul_(3)
    return v


def a_view_of_an_argument_that_is_written(x):
    v = x[0]
    x.mul_(3)
    return v


@pytest.mark.parametrize("function", [a_view, a_view_of_what_is_written, a_view_of_an_argument_that_is_written])
def test_views_without_one_are_eagers_and_nothing_is_warned(function):
    found = []
    for call in (function, foregrad.compile(function, backend="eager")):
        leaf = torch.ones(2, 3, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = call(leaf * 1)
        found.append((out, *torch.autograd.grad(out.sum(), leaf), type(out.grad_fn).__name__ != "NoneType"))
    (out, grad, history), (ours, gradient, ours_history) = found
    assert torch.equal(out, ours)
    assert torch.equal(grad, gradient)
    assert history == ours_history
