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
    """A tensor field network in small: features of degree 0, 1 and 2 on each atom, which turn with the input.

    Messages are tensor products of a neighbour's features with the spherical harmonics of the direction to it, put
    together by Clebsch-Gordan coefficients (for real harmonics), each path weighted by a function of the distance.
    """

    def __init__(self, width=3):
        super().__init__()
        self.width = width
        paths = [(i, j, k) for i in range(3) for j in range(3) for k in range(3) if abs(i - j) <= k <= i + j]
        self.paths = paths
        self.radial = nn.ModuleList(mlp(1, 6, len(paths) * width) for _ in range(2))
        self.mix = nn.ParameterList(nn.Parameter(torch.randn(width, width, dtype=D) / width) for _ in range(3))
        self.gate, self.energy = mlp(width, 6, 2 * width), mlp(width, 1)
        for i, j, k in paths:
            self.register_buffer(f"cg_{i}{j}{k}", clebsch_gordan(i, j, k))

    def forward(self, positions):
        n = positions.shape[0]
        there, here = (torch.eye(n) == 0).nonzero().unbind(1)
        apart = positions[there] - positions[here]
        distance = apart.pow(2).sum(-1, keepdim=True).sqrt()
        harmonics = spherical_harmonics(apart / distance)
        features = [positions.new_ones(n, self.width, 1)] + [positions.new_zeros(n, self.width, d) for d in (3, 5)]
        for radial in self.radial:
            weights = (radial(distance) * torch.exp(-distance)).view(len(there), len(self.paths), self.width)
            sums = [torch.zeros_like(f) for f in features]
            for number, (i, j, k) in enumerate(self.paths):
                product = torch.einsum(
                    "abc,eua,eb->euc", getattr(self, f"cg_{i}{j}{k}"), features[i][there], harmonics[j]
                )
                sums[k] = sums[k].index_add(0, here, product * weights[:, number, :, None])
            mixed = [torch.einsum("nui,uv->nvi", f, w) for f, w in zip(sums, self.mix, strict=True)]
            gates = self.gate(mixed[0][..., 0]).sigmoid().view(n, 2, self.width)
            scalars = features[0] + torch.nn.functional.silu(mixed[0])
            features = [scalars, *(mixed[k] * gates[:, k - 1, :, None] for k in (1, 2))]
        return self.energy(features[0][..., 0]).sum()


def spherical_harmonics(r):
    """Real harmonics of degree 0 to 2 of unit vectors, each of norm 1, in the order that `generators` is in."""
    x, y, z = r.unbind(-1)
    second = [x * y, y * z, (3 * z * z - 1) / (2 * 3**0.5), x * z, (x * x - y * y) / 2]
    return [torch.ones_like(r[:, :1]), r, torch.stack(second, -1) * 3**0.5]


def generators(degree):
    """How harmonics of a degree change as their argument is turned about each axis: three antisymmetric matrices."""
    r = torch.nn.functional.normalize(torch.linspace(-1, 1.3, 60, dtype=D).view(20, 3).cos() - 0.4, dim=-1)
    axes = torch.linalg.cross(torch.eye(3, dtype=D)[:, None].expand(3, 20, 3), r.expand(3, 20, 3), dim=-1)
    values = spherical_harmonics(r)[degree]
    changes = [torch.func.jvp(lambda r: spherical_harmonics(r)[degree], (r,), (a,))[1] for a in axes]
    return [torch.linalg.lstsq(values, change).solution.T for change in changes]


def clebsch_gordan(i, j, k):
    """The tensor, unique up to a factor, that turns with all three of its indices: what every generator leaves alone."""
    one, two, three = (torch.eye(2 * d + 1, dtype=D) for d in (i, j, k))
    rows = [
        torch.kron(torch.kron(a, two), three)
        + torch.kron(torch.kron(one, b), three)
        + torch.kron(torch.kron(one, two), c)
        for a, b, c in zip(generators(i), generators(j), generators(k), strict=True)
    ]
    _, sizes, right = torch.linalg.svd(torch.cat(rows))
    assert sizes[-1] < 1e-9 < (sizes[-2] if len(sizes) > 1 else 1)
    found = right[-1] * right[-1][right[-1].abs() > 1e-3][0].sign()
    return found.view(2 * i + 1, 2 * j + 1, 2 * k + 1)


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
