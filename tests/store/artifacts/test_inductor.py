"""Loaded artifacts compiled by Inductor: training, sizes that vary, second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.inductor.backend import why_not
from tests.store.artifacts.through_a_file import loaded_again

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not([torch.device("cpu")]) is not None, reason="Inductor can't compile here"),
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x):
        return torch.softmax(self.layers(x), -1)


@pytest.mark.parametrize("dynamic", [None, ({0: True},)])
def test_training(dynamic):
    torch.manual_seed(0)
    module = Model()
    loaded = loaded_again(foregrad.export(module, (torch.randn(6, 8),), dynamic_shapes=dynamic))
    compiled = foregrad.compile(loaded, backend="inductor")
    for size in (6, 9) if dynamic else (6, 6):
        x = torch.randn(size, 8)
        for model in (module, compiled):
            model.zero_grad()
            model(x).square().sum().backward()
        for a, b in zip(module.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        for (name, a), (_, b) in zip(module.named_buffers(), compiled.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    # The graphs of the artifact are as they were.
    assert "torch.ops.aten.gelu.default" in str(loaded.artifact)


def test_second_derivatives():
    def energy(x, w):
        return ((x @ w).tanh() * x.sum(-1, keepdim=True)).sum()

    args = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    loaded = loaded_again(foregrad.export(energy, args, derivatives=2))
    results = []
    for f in (energy, loaded.with_backend("inductor")):
        (slope,) = torch.autograd.grad(f(*args), args[0], create_graph=True)
        results.append([slope, *torch.autograd.grad(slope.square().sum(), args)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_without_gradients():
    module = Model().eval()
    with torch.no_grad():
        loaded = loaded_again(foregrad.export(module, (torch.randn(6, 8),)), backend="inductor")
        x = torch.randn(6, 8)
        torch.testing.assert_close(loaded(x), module(x))
