"""A leaf that a function makes and returns, and computes other results from: the gradient by it is never left out."""

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedError


def made_and_used(x):
    a = (x * 2).detach().requires_grad_()
    return a, a.sin() * x


def alone(x):
    a = (x * 2).detach().requires_grad_()
    return a, a.sin()


def new(x):
    a = torch.ones(2, 2, requires_grad=True)
    return {"leaf": a}, [a * x]


def by_a_gradient(x):
    a = (x * 2).detach().requires_grad_()
    (g,) = torch.autograd.grad(a.sin().sum(), a, create_graph=True)
    return a, g * x


def twice(x):
    a = (x * 2).detach().requires_grad_()
    return a, a.sin() * x, a.cos()


USED = (made_and_used, alone, new, by_a_gradient, twice)


def parts(function, x):
    leaf, *others = torch.utils._pytree.tree_leaves(function(x))
    assert leaf.is_leaf and leaf.requires_grad
    return leaf, sum(other.sum() for other in others)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("function", USED)
def test_a_gradient_by_such_a_leaf_is_refused_by_name_and_others_are_given(function, native):
    with foregrad.config.override(native=native):
        compiled = foregrad.compile(function, backend="eager")
        x = torch.ones(2, 2).requires_grad_()
        for ask in (lambda leaf, loss: torch.autograd.grad(loss, leaf), lambda leaf, loss: loss.backward()):
            leaf, loss = parts(compiled, x)
            with pytest.raises(UnsupportedError, match="makes the leaf"):
                ask(leaf, loss)
        eager, ours = (torch.autograd.grad(parts(f, x)[1], x, allow_unused=True)[0] for f in (function, compiled))
        assert (eager is None) == (ours is None)
        assert eager is None or torch.equal(eager, ours)


def test_a_leaf_that_nothing_is_computed_from_is_as_before():
    def function(x):
        a = (x * 2).detach().requires_grad_()
        (g,) = torch.autograd.grad(a.sin().sum(), a)
        return a, g * x

    for run in (function, foregrad.compile(function, backend="eager")):
        x = torch.ones(2, 2).requires_grad_()
        leaf, loss = parts(run, x)
        (loss + (leaf * 3).sum()).backward()
        assert torch.equal(leaf.grad, torch.full((2, 2), 3.0))
        assert torch.equal(x.grad, (2 * torch.ones(2, 2)).cos())
