"""Recurrent layers: their kernel keeps a workspace for the backward, and only fills it in grad mode."""

import pytest
import torch
from torch import nn

import foregrad

KINDS = [nn.LSTM, nn.GRU, nn.RNN]


def equal(layer, *shape):
    compiled = foregrad.compile(layer, backend="eager")
    for _ in range(2):
        x = torch.randn(*shape, requires_grad=True)
        found = []
        for model in (layer, compiled):
            out = model(x)[0]
            found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
        for eager, ours in zip(*found, strict=True):
            assert torch.equal(eager, ours)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_eagers_bit_for_bit(kind):
    torch.manual_seed(0)
    equal(kind(4, 5, num_layers=2, bidirectional=True), 3, 2, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_one_that_comes_first(kind):
    """A kernel's workspace means nothing but to itself: the layouts of the backward's results are not found by running
    it on zeros.
    """
    torch.manual_seed(0)
    equal(kind(4, 5, batch_first=True), 1, 3, 4)
