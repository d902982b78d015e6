"""Loaded artifacts differentiated once, twice and three times; forces inside a loss; what was not exported is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ArtifactCallError, UnsupportedError
from tests.parity.oracle import check
from tests.store.artifacts.through_a_file import loaded_again, through_a_file


class ForceField(nn.Module):
    """Energies of atoms from their distances; forces are their gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1)).double()
        self.register_buffer("centers", torch.linspace(0.5, 4.0, 8, dtype=torch.float64))

    def energy(self, positions):
        steps = positions[:, None] - positions[None, :]
        distances = (steps.square().sum(-1) + torch.eye(positions.shape[0], dtype=positions.dtype)).sqrt()
        features = torch.exp(-(distances[..., None] - self.centers).square())
        return self.layers(features).sum()

    def forward(self, positions):
        return self.energy(positions)


class WithForces(ForceField):
    """The derivative is inside."""

    def forward(self, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.energy(positions)
            (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -slope


def positions(seed=0, atoms=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(atoms, 3, dtype=torch.float64, generator=generator, requires_grad=True)


def loss_of(energy, forces):
    return energy.square() + forces.square().sum()


def same(expected, found, *, exactly=True):
    """None where there is none, and equal; in higher orders eager may add the same terms up in another order."""
    assert [a is None for a in expected] == [b is None for b in found]
    for a, b in zip(expected, found, strict=True):
        assert a is None or torch.equal(a, b) or (not exactly and torch.allclose(a, b, rtol=1e-12, atol=1e-12))


def gradients(module, loss):
    return torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)


@pytest.mark.parametrize("dynamic", [None, {"positions": {0: True}}])
def test_energy_and_forces_with_the_derivative_inside(dynamic):
    """Training on forces, at inference and for other numbers of atoms."""
    torch.manual_seed(0)
    module = WithForces()
    x = positions().detach()
    loaded = loaded_again(foregrad.export(module, (x,), dynamic_shapes=dynamic))
    for atoms in (5, 7) if dynamic else (5,):
        x = positions(1, atoms).detach()
        expected, found = module(x), loaded(x)
        same(expected, found)
        same(gradients(module, loss_of(*expected)), gradients(loaded, loss_of(*found)), exactly=False)


@pytest.mark.parametrize("dynamic", [None, {"positions": {0: True}}])
def test_energy_alone_and_forces_outside(dynamic):
    torch.manual_seed(0)
    module = ForceField()
    loaded = loaded_again(foregrad.export(module, (positions(),), dynamic_shapes=dynamic, derivatives=2))
    assert loaded.artifact.specializations[0].program.order() == 2
    for atoms in (5, 8) if dynamic else (5,):
        results = []
        for model in (module, foregrad.compile(module, backend="eager"), loaded):
            x = positions(2, atoms)
            energy = model(x)
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            results.append([energy, slope, *gradients(model, loss_of(energy, slope))])
        same(results[0], results[2], exactly=False)
        same(results[1], results[2])


def cubes(x, y):
    return (x**3 * y).sum()


def two_results(x, y):
    return (x**3 * y).sum(), x.sin() * y


def with_constant_parts(x, y):
    return (x.detach() * x * y).sum() * y.sum()


def in_place(x, y):
    z = x * y
    z.add_(x.sin() * y)
    return z.exp()


def random(x, y):
    return nn.functional.dropout(x * x, 0.5) * y.tanh()


PROGRAMS = [cubes, two_results, with_constant_parts, in_place, random]


def pair():
    return tuple(torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", [2, 3])
def test_higher_orders(f, order):
    """As eager's, and to the last bit those of the function compiled where it is."""
    found = []
    for function in (f, foregrad.compile(f, backend="eager"), through_a_file(f, derivatives=order)):
        torch.manual_seed(0)
        x, y = pair()
        torch.manual_seed(1)
        out = function(x, y)
        results = [out] if isinstance(out, torch.Tensor) else list(out)
        values = list(results)
        for depth in range(order):
            loss = sum(r.square().sum() if depth == 0 else r.sin().sum() for r in results)
            results = list(torch.autograd.grad(loss, [x, y], create_graph=depth < order - 1, allow_unused=True))
            values += results
            results = [r for r in results if r is not None and r.requires_grad]
        found.append(values)
    same(found[0], found[2], exactly=False)
    same(found[1], found[2])


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_first_orders_by_the_oracle(f):
    assert check(f, pair, compile=lambda fn: through_a_file(fn, derivatives=2), order=2, atol=1e-12) == "equal"


def test_what_was_not_exported_is_refused():
    x, y = pair()
    loaded = loaded_again(foregrad.export(cubes, (x, y), derivatives=1))
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        torch.autograd.grad(loaded(x, y), x, create_graph=True)


def three(x):
    return x.sin(), x.cos(), x.exp()


def test_other_parts_of_the_results_are_refused_by_name():
    x = torch.randn(3, requires_grad=True)
    loaded = loaded_again(foregrad.export(three, (x,), derivatives=2))
    a, *_ = loaded(x)
    (slope,) = torch.autograd.grad(a.sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], -x.sin())
    with pytest.raises(ArtifactCallError, match=r"out\[0\] and out\[1\]"):
        torch.autograd.grad((loaded(x)[0] + loaded(x)[1]).sum() + sum(loaded(x)[:2]).sum(), x, create_graph=True)


def test_without_gradients():
    module = nn.Linear(3, 2)
    artifact = foregrad.export(module, (torch.ones(4, 3),), derivatives=0)
    assert artifact.specializations[0].program.order() == 0
    loaded = loaded_again(artifact)
    with torch.no_grad():
        assert torch.equal(loaded(torch.ones(4, 3)), module(torch.ones(4, 3)))
