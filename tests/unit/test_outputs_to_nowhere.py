"""Several outputs that lead to leaves which the function makes, and to no input: nothing there is an effect.

And what is no strided tensor is refused by name where it is made.
"""

import logging

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedLayoutError


def copies(x):
    leaf = torch.ones(3, requires_grad=True)
    copy = leaf.clone()
    return copy * 2, copy.sin()


def leaf_itself(x):
    leaf = torch.ones(3, requires_grad=True)
    return leaf * 2, leaf.sin(), leaf + x


def of_values(x):
    leaf = x.detach().clone().requires_grad_()
    return leaf * 2, leaf.sin(), leaf.exp()


def two_leaves(x):
    a, b = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    return a * b, a + b, a.cos() * x


def views(x):
    leaf = torch.ones(3, requires_grad=True)
    return leaf[1:] * 2, leaf[:2].sin(), leaf.expand(2, 3).sum(0)


def written(x):
    leaf = torch.ones(3, requires_grad=True)
    copy = leaf.clone()
    copy[0] = 2.0
    return copy * 2, copy.sin(), x * copy


def gradient_inside(x):
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(leaf.square().sum(), leaf, create_graph=True)
    return gradient * 2, gradient.sin(), x * 2


PROGRAMS = [copies, leaf_itself, of_values, two_leaves, views, written, gradient_inside]


def results(function):
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    outputs = function(x)
    sum(output.sum() for output in outputs).backward()
    return [*(output.detach() for output in outputs), x.grad]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_as_in_eager(program, native):
    with foregrad.config.override(native=native):
        ours = results(foregrad.compile(program, backend="eager"))
    torch.testing.assert_close(ours, results(program), rtol=0, atol=0)


SPARSE = [
    lambda x: torch.sparse_coo_tensor([[0, 1], [2, 0]], x, (2, 3)),
    lambda x: torch.sparse_coo_tensor([[0, 1], [2, 0]], [1.0, 2.0]),
    lambda x: torch.sparse_csr_tensor([0, 1, 2], [2, 0], [1.0, 2.0]),
    lambda x: torch.sparse_csc_tensor([0, 1, 2], [1, 0], x),
    lambda x: torch.sparse_bsr_tensor([0, 1], [0], [[[1.0, 2.0], [3.0, 4.0]]]),
    lambda x: torch.sparse_compressed_tensor([0, 1, 2], [2, 0], x, layout=torch.sparse_csr),
]


@pytest.mark.parametrize("make", SPARSE)
def test_sparse_tensors_are_refused_by_name(make, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(UnsupportedLayoutError, match=r"not strided, at .*\.py:"):
        foregrad.capture(lambda x: make(x).to_dense().sum(), torch.ones(2, requires_grad=True))
    assert not caplog.records  # PyTorch's own tracebacks
