"""Modules whose class defines `__call__`, as people write wrappers round a model."""

from __future__ import annotations

import copy

import torch

import foregrad


class CallOnly(torch.nn.Module):
    """No forward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.calls = 0

    def __call__(self, x, *, scale=1.0):
        self.calls += 1
        return self.linear(x) * scale


class CallAround(CallOnly):
    """A forward, and something round it."""

    def __call__(self, x, *, scale=1.0):
        self.calls += 1
        return torch.nn.Module.__call__(self, x) * scale

    def forward(self, x):
        return self.linear(x)


def check(module, twin):
    compiled = foregrad.compile(module, backend="eager")
    for scale in (1.0, 2.0, 2.0):
        x = torch.randn(2, 3)
        result, expected = compiled(x, scale=scale), twin(x, scale=scale)
        (result.sum() + expected.sum()).backward()
        assert torch.equal(result, expected)
        assert torch.equal(module.linear.weight.grad, twin.linear.weight.grad)
    assert module.calls == twin.calls
    return compiled


def test_a_module_without_a_forward_is_compiled_as_it_is_called():
    module = CallOnly()
    compiled = check(module, copy.deepcopy(module))
    assert foregrad.explain_recompiles(compiled).entries


def test_what_is_round_a_forward_runs_round_the_compiled_one():
    module = CallAround()
    compiled = check(module, copy.deepcopy(module))
    assert len(foregrad.explain_recompiles(compiled).entries) == 1


def test_a_copy_of_it_is_compiled():
    module = CallOnly()
    copied = copy.deepcopy(foregrad.compile(module, backend="eager"))
    x = torch.randn(2, 3)
    assert torch.equal(copied(x), module(x))
    assert foregrad.explain_recompiles(copied).entries
