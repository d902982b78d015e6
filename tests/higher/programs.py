"""Six programs that differentiate more than once, each as `steps(compile, count) -> losses and final parameters`."""

from __future__ import annotations

import itertools

import torch
from torch import nn

D = torch.float64


def mlp(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(D)


def finish(losses, *modules):
    return [torch.stack(losses), *(p.detach() for m in modules for p in m.parameters())]


def grad(out, x):
    return torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def laplacian(u, x):
    first = grad(u, x)
    return sum(grad(first[:, i], x)[:, i] for i in range(x.shape[1]))


def pinn(compile, count):
    """Laplacian and biharmonic of a network, the network compiled, the derivatives taken outside."""
    net = mlp(2, 8, 8, 1)
    run = compile(net)
    x = (torch.rand(12, 2, dtype=D)).requires_grad_()
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    for _ in range(count):
        optimizer.zero_grad()
        u = run(x)[:, 0]
        lap = laplacian(u, x)
        loss = (lap + x.detach().sin().prod(-1)).pow(2).mean() + laplacian(lap, x).pow(2).mean() * 1e-3
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return finish(losses, net)


class ForceField(nn.Module):
    """Message passing over pairs within reach; the energy of a configuration."""

    def __init__(self, width=8):
        super().__init__()
        self.message, self.update, self.energy = mlp(1 + width, width, width), mlp(width, width, width), mlp(width, 1)
        self.width = width

    def forward(self, positions):
        n = positions.shape[0]
        i, j = torch.triu_indices(n, n, 1)
        i, j = torch.cat((i, j)), torch.cat((j, i))
        distance = (positions[i] - positions[j]).pow(2).sum(-1, keepdim=True).sqrt()
        state = positions.new_ones(n, self.width)
        for _ in range(2):
            messages = self.message(torch.cat((distance, state[j]), -1)) * torch.exp(-distance)
            state = state + self.update(torch.zeros_like(state).index_add(0, i, messages))
        return self.energy(state).sum()


def train_forces(module, compile, count):
    """Force matching: the loss is of -dE/dx, which is taken inside the compiled function."""

    def energy_and_forces(x):
        energy = module(x)
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]

    run = compile(energy_and_forces)
    wanted = torch.randn(5, 3, dtype=D)
    optimizer, losses = torch.optim.Adam(module.parameters(), 1e-2), []
    for step in range(count):
        x = (torch.linspace(0, 4, 15, dtype=D).view(5, 3).cos() + 0.01 * step).requires_grad_()
        optimizer.zero_grad()
        energy, forces = run(x)
        loss = (forces - wanted).pow(2).mean() + energy.pow(2) * 1e-2
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return finish(losses, module)


def force_field(compile, count):
    return train_forces(ForceField(), compile, count)


class Equivariant(nn.Module):
    """Scalars and vectors on each atom, mixed so that rotating the input rotates the vectors."""

    def __init__(self, width=6):
        super().__init__()
        self.radial, self.gate, self.energy = mlp(1, width, width), mlp(2 * width, width, width), mlp(width, 1)
        self.mix = nn.Parameter(torch.randn(width, width, dtype=D) / width)

    def forward(self, positions):
        n = positions.shape[0]
        apart = positions[:, None] - positions[None]
        distance = (apart.pow(2).sum(-1) + torch.eye(n, dtype=D)).sqrt()
        weights = self.radial(distance[..., None]) * (1 - torch.eye(n, dtype=D))[..., None]
        scalars = weights.sum(1)
        vectors = torch.einsum("ijc,ijx->icx", weights, apart / distance[..., None])
        vectors = torch.einsum("icx,cd->idx", vectors, self.mix)
        lengths = vectors.pow(2).sum(-1)
        scalars = scalars + self.gate(torch.cat((scalars, lengths), -1))
        return self.energy(scalars).sum()


def equivariant(compile, count):
    return train_forces(Equivariant(), compile, count)


def wgan_gp(compile, count):
    """A critic with a gradient penalty at random points in between."""
    critic, generator = mlp(2, 8, 8, 1), mlp(3, 8, 2)
    run_critic, run_generator = compile(critic), compile(generator)
    of_critic = torch.optim.Adam(critic.parameters(), 1e-2)
    of_generator = torch.optim.Adam(generator.parameters(), 1e-2)
    losses = []
    for _ in range(count):
        real, noise = torch.randn(6, 2, dtype=D) + 1, torch.randn(6, 3, dtype=D)
        fake = run_generator(noise)
        mixed = torch.lerp(real, fake.detach(), torch.rand(6, 1, dtype=D)).requires_grad_()
        slope = grad(run_critic(mixed), mixed).norm(dim=-1)
        loss = run_critic(fake.detach()).mean() - run_critic(real).mean() + 10 * (slope - 1).pow(2).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        (-run_critic(fake).mean()).backward()
        of_generator.step()
        losses.append(loss.detach())
    return finish(losses, critic, generator)


def maml(compile, count):
    """Three inner steps of gradient descent, differentiated through."""
    net = mlp(1, 8, 1)
    names = [name for name, _ in net.named_parameters()]

    def task_loss(weights, x, y):
        return (torch.func.functional_call(net, dict(zip(names, weights, strict=True)), x) - y).pow(2).mean()

    run = compile(task_loss)
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    x = torch.linspace(-1, 1, 8, dtype=D).view(8, 1)
    for step in range(count):
        y = (x * 3 + 0.3 * step).sin()
        weights = list(net.parameters())
        for _ in range(3):
            grads = torch.autograd.grad(run(weights, x, y), weights, create_graph=True)
            weights = [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]
        loss = run(weights, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return finish(losses, net)


def hessian_free(compile, count):
    """Newton steps, each solved by conjugate gradients over Hessian-vector products."""
    net = mlp(2, 4, 1)
    run = compile(net)
    parameters = list(net.parameters())
    x = torch.randn(10, 2, dtype=D)
    y = x.prod(-1, keepdim=True)
    losses = []

    def dot(a, b):
        return sum((p * q).sum() for p, q in zip(a, b, strict=True))

    for _ in range(count):
        loss = (run(x) - y).pow(2).mean()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)

        def product(v, grads=grads):
            hv = torch.autograd.grad(grads, parameters, v, retain_graph=True)
            return [h + 1.0 * q for h, q in zip(hv, v, strict=True)]  # damped

        step = [torch.zeros_like(p) for p in parameters]
        residual = [-g.detach() for g in grads]
        direction, size = residual, dot(residual, residual)
        for _ in range(4):
            image = product(direction)
            alpha = size / dot(direction, image)
            step = [s + alpha * d for s, d in zip(step, direction, strict=True)]
            residual = [r - alpha * i for r, i in zip(residual, image, strict=True)]
            new_size = dot(residual, residual)
            direction = [r + new_size / size * d for r, d in zip(residual, direction, strict=True)]
            size = new_size
        with torch.no_grad():
            for p, s in zip(parameters, step, strict=True):
                p.add_(s)
        losses.append(loss.detach())
    return finish(losses, net)


PROGRAMS = {
    "pinn": pinn,
    "force field": force_field,
    "equivariant": equivariant,
    "wgan-gp": wgan_gp,
    "maml": maml,
    "hessian free": hessian_free,
}
