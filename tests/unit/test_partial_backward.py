"""The backward of some outputs only: what is None and what is zeros, as in eager."""

import pytest
import torch

import foregrad


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * 2, b * 3

    @staticmethod
    def backward(ctx, for_a, for_b):
        return for_a * 2, for_b * 3


def norm(x, weight):
    return torch.native_group_norm(x, weight, None, 2, 4, 3, 2, 1e-5)


CASES = {
    "separate": lambda x, y: (x.sin(), y.cos()),
    "one of two": lambda x, y: (x * y, y.cos()),
    "custom function": lambda x, y: Both.apply(x, y),
    "pieces": lambda x, y: (x + y).unbind(0),
    "a formula that gives zeros": lambda x, y: torch.triangular_solve(x[:4, :2], y[:4, :4] + 4 * torch.eye(4)),
    "least squares": lambda x, y: torch.linalg.lstsq(x[:, :2], y[:, :1])[:2],
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_there_where_eagers_are(name, which):
    f = CASES[name]
    compiled = foregrad.compile(f, backend="eager")
    torch.manual_seed(0)
    x, y = torch.randn(4, 4).requires_grad_(), torch.randn(4, 4).requires_grad_()
    found = []
    for function in (f, compiled):
        out = function(x, y)[which]
        found.append(torch.autograd.grad(out.sum(), (x, y), allow_unused=True) if out.requires_grad else "none")
    for eager, ours in zip(*found, strict=True):
        assert (eager is None) == (ours is None)
        assert eager is None or eager == "n" or torch.equal(eager, ours)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_the_gradients_of_a_norm_from_its_statistics_are_eagers(which):
    x, weight = torch.randn(2, 4, 3).requires_grad_(), torch.randn(4).requires_grad_()
    found = []
    for function in (norm, foregrad.compile(norm, backend="eager")):
        results = function(x, weight)
        loss = sum(results[i].sin().sum() for i in which)
        found.append(torch.autograd.grad(loss, (x, weight), allow_unused=True))
    for eager, ours in zip(*found, strict=True):
        assert (eager is None) == (ours is None)
        assert eager is None or torch.equal(eager, ours)
