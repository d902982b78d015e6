"""Parameters put in place of others again and again, as `functional_call` does: each call runs with those of now."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

import foregrad


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("deep", [1, 4])
def test_each_call_has_the_parameters_of_now(deep, native):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(deep)))
    own = dict(net.named_parameters())
    kinds = [
        lambda w: w,
        lambda w: w * 1.5,
        lambda w: (w * 0.25).detach(),
        lambda w: w.detach().clone().requires_grad_(),
    ]
    x = torch.randn(2, 3)
    with foregrad.config.override(native=native):
        compiled = foregrad.compile(net, backend="eager")
        for number in range(16):
            kind, scale = kinds[number * 7 % 4], 1 + number / 10
            weights = {name: kind(w * scale if number % 4 else w) for name, w in own.items()}
            torch.testing.assert_close(functional_call(compiled, weights, (x,)), functional_call(net, weights, (x,)))


def test_assigning_parameters():
    net = nn.Linear(3, 3)
    compiled, x = foregrad.compile(net, backend="eager"), torch.randn(2, 3)
    for number in range(8):
        net.weight = nn.Parameter(torch.full((3, 3), float(number)))
        torch.testing.assert_close(compiled(x), net(x))


def test_parameters_of_a_compiled_module_may_be_swapped():
    """`swap_tensors` refuses tensors that have weak references, which is how `module.double()` works with that switch."""
    model = nn.Linear(3, 3)
    compiled, x = foregrad.compile(model, backend="eager"), torch.ones(2, 3)
    compiled(x).sum().backward()
    model.weight.grad = model.bias.grad = None
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.full((3, 3), 2.0)))
    assert torch.equal(compiled(x), model(x))
    (ours,) = torch.autograd.grad(compiled(x).sum(), model.weight)
    assert torch.equal(ours, torch.full((3, 3), 2.0))


@pytest.mark.parametrize("door", ["torch.compile", "an argument"])
def test_parameters_that_are_arguments_may_be_swapped(door):
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    if door == "torch.compile":
        call = torch.compile(model, backend="foregrad", options={"backend": "eager"})
    else:
        compiled = foregrad.compile(nn.functional.linear, backend="eager")
        call = lambda x: compiled(x, model.weight, model.bias)
    call(x).sum().backward()
    model.weight.grad = model.bias.grad = None
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.full((3, 3), 2.0)))
    assert torch.equal(call(x), model(x))
