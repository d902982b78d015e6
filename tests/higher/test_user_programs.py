"""What users of second derivatives write, compiled piece by piece or whole, against eager."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import foregrad
from tests.higher.programs import D, ForceField, grad, mlp

compiled = functools.partial(foregrad.compile, backend="eager")


def eager(f):
    return f


def leaf(*shape):
    return torch.randn(*shape, dtype=D).requires_grad_()


def navier_stokes_residual(compile):
    """Stream function and pressure from one network; derivatives to the third, outputs picked apart."""
    net = mlp(3, 10, 10, 2)
    run = compile(net)
    x, y, t = (leaf(7, 1) for _ in range(3))
    psi, p = run(torch.cat((x, y, t), 1)).split(1, 1)
    u, v = grad(psi, y), -grad(psi, x)
    residual = (
        grad(u, t) + u * grad(u, x) + v * grad(u, y) + grad(p, x) - 0.01 * (grad(grad(u, x), x) + grad(grad(u, y), y))
    )
    residual.pow(2).mean().backward()
    return [residual, *(q.grad for q in net.parameters())]


def monge_ampere(compile):
    """The determinant of a Hessian, by torch.func, in a loss."""
    net = mlp(2, 8, 1)
    run = compile(net)
    x = torch.rand(5, 2, dtype=D)
    hessians = torch.func.vmap(torch.func.hessian(lambda p: run(p[None])[0, 0]))(x)
    loss = (torch.linalg.det(hessians) - 1).pow(2).mean()
    loss.backward()
    return [hessians, *(q.grad for q in net.parameters())]


def stress_and_forces(compile):
    """Forces and a virial by a strain that is zero, both in the loss."""
    module = ForceField(4)
    run = compile(module)
    positions, strain = leaf(5, 3), torch.zeros(3, 3, dtype=D, requires_grad=True)
    energy = run(positions @ (torch.eye(3, dtype=D) + (strain + strain.mT) / 2))
    forces, stress = torch.autograd.grad(energy, [positions, strain], create_graph=True)
    (forces.pow(2).sum() + stress.pow(2).sum() + energy).backward()
    return [energy, forces, stress, positions.grad, *(q.grad for q in module.parameters())]


def hessian_of_energy(compile):
    """The dynamical matrix, row by row and vectorized."""
    module = ForceField(4)
    run = compile(module)
    x = leaf(3, 3)
    forces = -torch.autograd.grad(run(x), x, create_graph=True)[0].reshape(-1)
    rows = [torch.autograd.grad(-f, x, retain_graph=True)[0].reshape(-1) for f in forces]
    at_once = torch.autograd.grad(-forces, x, torch.eye(9, dtype=D), is_grads_batched=True)[0]
    return [torch.stack(rows), at_once]


def maml_with_modules(compile):
    """The inner steps by functional_call over the compiled module, first-order and full."""
    net = mlp(1, 6, 1)
    run = compile(net)
    x = torch.linspace(-1, 1, 5, dtype=D).view(5, 1)
    found = []
    for full in (True, False):
        weights = dict(net.named_parameters())
        for _ in range(2):
            loss = (torch.func.functional_call(run, weights, (x,)) - x.sin()).pow(2).mean()
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=full)
            weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        outer = (torch.func.functional_call(run, weights, (x,)) - x.cos()).pow(2).mean()
        found += [outer, *torch.autograd.grad(outer, list(net.parameters()))]
    return found


def implicit_maml(compile):
    """A meta-gradient by the implicit function theorem: a linear system in Hessian-vector products."""
    inner = compile(lambda w, m: (torch.tanh(w) - m).pow(2).sum() + (w * m).sum().sin() + w.pow(4).sum())
    m, w = leaf(4), leaf(4)
    (first,) = torch.autograd.grad(inner(w, m), w, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(f, w, retain_graph=True)[0] for f in first])
    v = torch.linalg.solve(hessian + 3 * torch.eye(4, dtype=D), w.detach())
    return [hessian, *torch.autograd.grad(first, m, v)]


def learned_optimizer(compile):
    """Unrolled steps whose rule is learned, compiled as one function that differentiates inside."""
    rule = mlp(1, 4, 1)
    target = torch.randn(3, dtype=D)

    def step(w):
        loss = (w - target).pow(2).sum() + w.sin().sum()
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        return w + rule(g[:, None])[:, 0], loss

    run, w, total = compile(step), torch.zeros(3, dtype=D, requires_grad=True), 0
    for _ in range(3):
        w, loss = run(w)
        total = total + loss
    total.backward()
    return [w, *(q.grad for q in rule.parameters())]


def penalties(compile):
    """WGAN-GP, R1 and a consistency term on one critic with dropout and batch statistics, in one backward."""
    critic = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).to(D)
    run = compile(critic)
    real, fake = leaf(6, 2), leaf(6, 2)
    on_real, on_fake = run(real), run(fake)
    mixed = torch.lerp(real, fake, 0.3).detach().requires_grad_()
    slope = grad(run(mixed), mixed).norm(dim=1)
    loss = on_fake.mean() - on_real.mean() + 10 * (slope - 1).pow(2).mean() + grad(on_real, real).pow(2).sum()
    loss.backward()
    return [loss, *(q.grad for q in critic.parameters()), *critic.buffers()]


def influence(compile):
    """Influence of training points on a test loss: stochastic estimation of inverse-Hessian-vector products."""
    net = mlp(2, 4, 1)
    run = compile(lambda x, y: (net(x) - y).pow(2).mean())
    parameters = list(net.parameters())
    x, y = torch.randn(8, 2, dtype=D), torch.randn(8, 1, dtype=D)
    wanted = torch.autograd.grad(run(x[:2], y[:2]), parameters)
    estimate = wanted
    for i in range(4):
        grads = torch.autograd.grad(run(x[i : i + 4], y[i : i + 4]), parameters, create_graph=True)
        products = torch.autograd.grad(grads, parameters, estimate)
        estimate = [v + 0.9 * e - 0.05 * p for v, e, p in zip(wanted, estimate, products, strict=True)]
    return [
        sum(
            (e * g).sum() for e, g in zip(estimate, torch.autograd.grad(run(a[None], b[None]), parameters), strict=True)
        )
        for a, b in zip(x, y, strict=True)
    ]


def per_sample_fisher(compile):
    """Gradients of each sample by vmap over grad, and a Gauss-Newton product by jvp and vjp."""
    net = mlp(2, 4, 3)
    run = compile(net)
    weights = {n: w.detach() for n, w in net.named_parameters()}
    x = torch.randn(5, 2, dtype=D)

    def loss(w, x):
        return torch.func.functional_call(run, w, (x[None],)).log_softmax(-1)[0, 1]

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    out, pushed = torch.func.jvp(
        lambda w: torch.func.functional_call(run, w, (x,)), (weights,), ({n: w.cos() for n, w in weights.items()},)
    )
    _, pull = torch.func.vjp(lambda w: torch.func.functional_call(run, w, (x,)), weights)
    return [*each.values(), out, pushed, *pull(pushed)[0].values()]


def sharpness_aware(compile):
    """Parameters written between two forwards; the curvature along the gradient after it."""
    net = mlp(2, 5, 1)
    run = compile(net)
    x = torch.randn(6, 2, dtype=D)
    parameters = list(net.parameters())
    grads = torch.autograd.grad(run(x).pow(2).mean(), parameters)
    with torch.no_grad():
        for w, g in zip(parameters, grads, strict=True):
            w.add_(g, alpha=0.05)
    again = torch.autograd.grad(run(x).pow(2).mean(), parameters, create_graph=True)
    return [*again, *torch.autograd.grad(again, parameters, grads)]


def score_matching(compile):
    """The trace of the score's Jacobian by Hutchinson's estimate."""
    net = mlp(3, 8, 1)
    run = compile(net)
    x = leaf(6, 3)
    score = grad(run(x), x)
    v = torch.randn(6, 3, dtype=D)
    loss = ((grad((score * v).sum(), x) * v).sum(1) + score.pow(2).sum(1) / 2).mean()
    loss.backward()
    return [loss, x.grad, *(q.grad for q in net.parameters())]


PROGRAMS = [
    navier_stokes_residual, monge_ampere, stress_and_forces, hessian_of_energy, maml_with_modules, implicit_maml,
    learned_optimizer, penalties, influence, per_sample_fisher, sharpness_aware, score_matching,
]  # fmt: skip


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_gives_what_it_gives_in_eager(program, partition):
    results = []
    for compile in (eager, functools.partial(compiled, partition=partition)):
        torch.manual_seed(3)
        results.append(program(compile))
    assert len(results[0]) == len(results[1])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("order", [2, 3])
def test_autocast_at_higher_orders(order):
    """Casts are part of the graph; derivatives run outside their region, as in eager."""
    results = []
    for run in (eager, compiled):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        f, x = run(net), torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = f(x).float().pow(2).sum()
        found = []
        for _ in range(order):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(g)
            value = g.pow(2).sum()
        value.backward()
        results.append([*found, *(p.grad for p in net.parameters())])
    for wanted, found in zip(*results, strict=True):
        assert wanted.dtype == found.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)


def test_aliased_outputs_and_inputs_that_share_memory_at_second_order():
    """Outputs that view one another, an input given twice and views of one base that is written (a synthetic base)."""

    def f(a, b, c):
        a.mul_(2)
        h = (b * c).sin()
        return h, h.t(), h[0], a * b

    results = []
    for run in (f, compiled(f)):
        torch.manual_seed(0)
        x = leaf(4, 4)
        base = x * 1.0
        outputs = run(base[:2, :2], base[:2, :2], base[1:3, 1:3])
        grads = torch.autograd.grad(sum(o.exp().sum() for o in outputs), x, create_graph=True)
        results.append([*outputs, *grads, *torch.autograd.grad(grads[0].pow(2).sum(), x)])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
