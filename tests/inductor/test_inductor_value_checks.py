"""Kernels that check values raise with Inductor what they raise in eager: its decompositions would leave the check out."""

import pytest
import torch
import torch.nn.functional as F

import foregrad

HALF = torch.full((3,), 0.5)

PROGRAMS = {
    "bernoulli": (torch.bernoulli, HALF, HALF * 3),
    "bernoulli_written": (lambda p: torch.empty(3).bernoulli_(p), HALF, -HALF),
    "normal": (lambda s: torch.normal(torch.zeros(3), s), HALF, -HALF),
    "normal_of_a_number": (lambda s: torch.normal(0.0, s) + 1, HALF, -HALF),
    "cross_entropy_of_probabilities": (lambda x: F.binary_cross_entropy(x, torch.ones(3)), HALF, HALF * 3),
    "its_module": (lambda x: torch.nn.BCELoss(reduction="none")(x * 1, torch.zeros(3)), HALF, HALF * float("nan")),
    "poisson": (torch.poisson, HALF, -HALF),
    "multinomial": (lambda p: torch.multinomial(p, 1), HALF, -HALF),
}


def called(function, x):
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    try:
        out = function(x)
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    if not out.requires_grad:
        return out
    return out, torch.autograd.grad(out.sum(), x)[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_raised_as_in_eager(name):
    function, good, bad = PROGRAMS[name]
    compiled = foregrad.compile(function, backend="inductor")
    torch.testing.assert_close(called(compiled, good), called(function, good))
    expected = called(function, bad)
    assert isinstance(expected[0], type)
    assert called(compiled, bad) == expected
