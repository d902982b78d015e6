"""Second derivatives through `torch.compile(backend="foregrad")`, with graph breaks, mixed with eager."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.func import hessian, jacfwd, jacrev, vmap

from tests.higher.programs import ForceField, grad, laplacian, mlp

D = torch.float64

# Dynamo looks at `.grad` of inputs that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def by_dynamo(function):
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


def both(program):
    """What a program of a compile function gives in eager and compiled, which must be close."""
    results = []
    for compile in (lambda f: f, by_dynamo):
        torch.manual_seed(0)
        torch._dynamo.reset()
        results.append(program(compile))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("order", [2, 3])
def test_a_pinn(order):
    def program(compile):
        net = mlp(2, 8, 1)
        run, found = compile(net), []
        for _ in range(2):
            x = torch.rand(6, 2, dtype=D).requires_grad_()
            residual = laplacian(run(x)[:, 0], x)
            if order == 3:
                residual = grad(residual, x)
            net.zero_grad()
            residual.pow(2).mean().backward()
            found += [residual.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
        return found

    both(program)


def test_force_matching_over_steps():
    def program(compile):
        field = ForceField()
        run, losses = compile(field), []
        optimizer = torch.optim.SGD(field.parameters(), 1e-2)
        x, wanted = torch.randn(5, 3, dtype=D).requires_grad_(), torch.randn(5, 3, dtype=D)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (-grad(run(x), x) - wanted).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    both(program)


def test_across_a_graph_break_and_eager_code():
    def program(compile):
        net, w = mlp(3, 6, 2), torch.randn(2, dtype=D).requires_grad_()

        def f(x):
            y = net(x).sin()
            torch._dynamo.graph_break()
            return (y * w).exp().sum(1) * x.pow(3).sum(1)

        x = torch.randn(4, 3, dtype=D).requires_grad_()
        y = torch.tanh(compile(f)(x.cos()) * x[:, 0])
        first = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), [x, w], create_graph=True)
        sum(g.pow(2).sum() for g in second).backward()
        return [y, *first, *second, x.grad, w.grad, *(p.grad for p in net.parameters() if p.grad is not None)]

    both(program)


def test_two_compiled_parts_in_a_row_and_a_varying_size():
    def program(compile):
        a, b = mlp(2, 6, 3), mlp(3, 5, 1)
        first, second, found = compile(a), compile(b), []
        for size in (4, 6, 7):
            x = torch.rand(size, 2, dtype=D).requires_grad_()
            loss = laplacian(second(first(x))[:, 0], x).pow(2).sum()
            found += torch.autograd.grad(loss, [x, *a.parameters()], allow_unused=True, materialize_grads=True)
        return found

    both(program)


def test_a_gradient_penalty_with_only_some_inputs_differentiated_first():
    def program(compile):
        critic = mlp(3, 8, 1)
        run = compile(lambda x, scale: critic(x) * scale)
        x, scale = torch.randn(4, 3, dtype=D).requires_grad_(), torch.randn(1, dtype=D).requires_grad_()
        penalty = (grad(run(x, scale), x).norm(dim=1) - 1).pow(2).mean()
        penalty.backward()
        return [penalty.detach(), scale.grad, *(p.grad for p in critic.parameters() if p.grad is not None)]

    both(program)


@pytest.mark.parametrize("transform", [jacrev, hessian, jacfwd, lambda f: jacrev(jacrev(f))])
def test_transforms_over_a_parameter_that_the_graph_finds_late(transform):
    """Dynamo's graphs begin and end levels in lines of their own: a run that is made again begins with none."""
    layer = nn.Linear(3, 1)
    x = torch.randn(4, 3)

    def f(x):
        return vmap(transform(lambda z: layer(z).tanh().squeeze()))(x)

    torch.testing.assert_close(torch.compile(f, backend="foregrad", options={"backend": "eager"})(x), f(x))


def test_backwards_that_compiled_autograd_compiles():
    """The forward is foregrad's; what compiled autograd makes of a backward is its own, and said."""
    layer = nn.Linear(3, 1)

    def gradients(function):
        found = []
        for i in range(3):
            layer.zero_grad()
            x = torch.full((2, 3), i + 1.0, requires_grad=True)
            function(x).backward()
            found.append((layer.weight.grad.clone(), x.grad))
        return found

    def f(x):
        y = layer(x)
        y.register_hook(lambda gradient: gradient * 3)
        return y.sin().sum()

    expected = gradients(f)
    compiled = torch.compile(f, backend="foregrad", options={"backend": "eager", "on_unsupported": "eager"})
    with warnings.catch_warnings(), torch._dynamo.config.patch(compiled_autograd=True):
        warnings.simplefilter("ignore")
        found = gradients(compiled)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
