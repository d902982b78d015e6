"""A whole training step as an artifact: gradients and the optimizer's writes inside; or an error that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ArtifactCallError, UnsupportedSideEffectError
from tests.store.artifacts.through_a_file import loaded_again

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def training(make_optimizer, *, warm=True):
    net = network()
    optimizer = make_optimizer(net.parameters())

    def step(x, y):
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if warm:
        step(*batch(-1))  # which makes the optimizer's state
    return net, step


def batch(number):
    torch.manual_seed(100 + number)
    return torch.randn(16, 4), torch.randn(16, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_backward_and_an_optimizer_inside(name):
    _, step = training(OPTIMIZERS[name])
    loaded = loaded_again(foregrad.export(step, batch(0)))
    net, eager = training(OPTIMIZERS[name])
    assert [loaded(*batch(n)).item() for n in range(5)] == [eager(*batch(n)).item() for n in range(5)]
    tensors = dict(loaded.state_dict())
    assert all(any(torch.equal(value, found) for found in tensors.values()) for value in net.parameters())


class Step(nn.Module):
    """With an optimizer of its own, whose state is buffers."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("count", torch.zeros(()))
        for number, p in enumerate(self.net.parameters()):
            self.register_buffer(f"mean_{number}", torch.zeros_like(p))

    def forward(self, x, y):
        loss = (self.net(x) - y).square().mean()
        self.count += 1
        grads = torch.autograd.grad(loss, list(self.net.parameters()))
        with torch.no_grad():
            for number, (p, grad) in enumerate(zip(self.net.parameters(), grads, strict=True)):
                mean = getattr(self, f"mean_{number}").mul_(0.9).add_(grad, alpha=0.1)
                p.sub_(0.1 * mean / (1 - 0.9**self.count))
        return loss.detach()


def test_a_step_that_keeps_its_state_in_buffers():
    eager = Step()
    loaded = loaded_again(foregrad.export(Step(), batch(0)))
    for number in range(5):
        assert torch.equal(loaded(*batch(number)), eager(*batch(number)))
    expected = eager.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_an_optimizer_without_its_state_yet():
    _, step = training(OPTIMIZERS["momentum"], warm=False)
    with pytest.raises(UnsupportedSideEffectError, match=r"items in optimizer\.state"):
        foregrad.export(step, batch(0))


def test_an_optimizer_that_counts_in_python():
    """Adam computes with its count as a Python number: the artifact is for that count."""
    _, step = training(lambda p: torch.optim.Adam(p))
    loaded = loaded_again(foregrad.export(step, batch(0)))
    _, eager = training(lambda p: torch.optim.Adam(p))
    assert torch.equal(loaded(*batch(0)), eager(*batch(0)))
    with pytest.raises(
        ArtifactCallError, match=r"a value that is read at .*must be equal to the value at export.*a tensor"
    ):
        loaded(*batch(1))


def test_gradients_that_stay():
    net = network()

    def step(x, y):
        (net(x) - y).square().mean().backward()

    with pytest.raises(UnsupportedSideEffectError, match=r"set \.grad of parameter .*autograd\.grad"):
        foregrad.export(step, batch(0))
