"""A leaf that a function makes and returns, and computes other results from: the gradient by it is never left out."""

import contextlib

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedError


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


@pytest.mark.parametrize("function", USED)
def test_a_gradient_by_such_a_leaf_is_eagers(function):
    with pytest.raises(UnsupportedError, match="makes the leaf"):
        foregrad.compile(function, backend="eager")(torch.ones(2, 2).requires_grad_())
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    gradients = []
    for run in (function, compiled):
        x = torch.ones(2, 2).requires_grad_()
        with contextlib.nullcontext() if run is function else pytest.warns(ForegradWarning, match="makes the leaf"):
            leaf, loss = parts(run, x)
        gradients.append(torch.autograd.grad(loss, [leaf, x], allow_unused=True, retain_graph=True))
        loss.backward()
        assert torch.equal(leaf.grad, gradients[-1][0])
    for eager, ours in zip(*gradients, strict=True):
        assert (eager is None) == (ours is None)
        assert eager is None or torch.equal(eager, ours)


class Codes(nn.Module):
    """A codebook of a VQ-VAE that follows the averages of what it is given, as parameters made anew."""

    def __init__(self, uses_new):
        super().__init__()
        self.average = nn.Parameter(torch.ones(2, 2))
        self.uses_new = uses_new

    def forward(self, x):
        used = self.average
        self.average = nn.Parameter(0.9 * self.average.detach() + 0.1 * x.detach())
        return (x - (self.average if self.uses_new else used.detach())).pow(2).sum()


@pytest.mark.parametrize("uses_new", [False, True])
def test_a_parameter_that_a_call_puts_in_a_modules_place(uses_new):
    found = []
    for compiled in (False, True):
        module = Codes(uses_new)
        mode = "eager" if uses_new else "raise"
        run = foregrad.compile(module, backend="eager", on_unsupported=mode) if compiled else module
        x = torch.full((2, 2), 3.0).requires_grad_()
        steps = []
        with pytest.warns(ForegradWarning) if compiled and uses_new else contextlib.nullcontext():
            for _ in range(3):
                run(x).backward()
                (parameter,) = module.parameters()
                assert type(parameter) is nn.Parameter
                assert parameter.is_leaf
                steps += [parameter.detach().clone(), parameter.grad, x.grad.clone()]
        found.append(steps)
    for eager, ours in zip(*found, strict=True):
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
