"""Operators whose decomposition in PyTorch is not what the operator computes: with Inductor they are eager's all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import foregrad

TARGETS = ([0, 2, -1, 0, 0], [3, -1, 1, 1, 1], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0])


def check(function, *inputs):
    """Values and gradients."""
    compiled = foregrad.compile(function, backend="inductor")
    results = []
    for f in (function, compiled):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = f(*leaves)
        out.sum().backward()
        results.append([out, *(x.grad for x in leaves if x.requires_grad)])
    torch.testing.assert_close(results[1], results[0])
    assert len(compiled.foregrad.specializations) == 1


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_multilabel_margin_loss_counts_no_class_after_the_end(target):
    check(F.multilabel_margin_loss, torch.randn(3, 5), torch.tensor([target] * 3))


@pytest.mark.parametrize(("start", "end", "steps"), [(4.3, -3, 50), (4.3, 0, 50), (0, 7, 50), (4.3, 50, 50)])
def test_linspace_of_integers(start, end, steps):
    check(lambda x: x * torch.linspace(start, end, steps, dtype=torch.int64), torch.randn(steps))


@pytest.mark.parametrize(("dim", "shape"), [(0, (1, 4)), (1, (3, 1)), (-1, (3, 1))])
def test_index_add_with_an_index_without_dimensions(dim, shape):
    check(lambda x, i, y: x.index_add(dim, i, y, alpha=2), torch.randn(3, 4), torch.tensor(1), torch.randn(shape))


def test_the_gradient_of_a_selection_by_an_index_without_dimensions():
    check(lambda x, i: x.index_select(0, i).exp(), torch.randn(3, 4), torch.tensor(1))
