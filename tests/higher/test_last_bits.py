"""Where results are eager's bit for bit, beside the cases of docs/backends.md in which they are not."""

import pytest
import torch

import foregrad


def same_bits(eager, ours):
    assert len(eager) == len(ours)
    assert all(map(torch.equal, eager, ours))


def close(eager, ours):
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.fixture
def potential():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
    return torch.nn.Sequential(*layers)


def gradients(potential, energy_and_forces, weights):
    potential.zero_grad()
    torch.manual_seed(1)
    positions = torch.randn(5, 3).requires_grad_()
    energy, forces = energy_and_forces(positions)
    ((energy - 1) ** 2 * weights[0] + (forces**2).sum() * weights[1]).backward()
    return [energy, forces, positions.grad, *(p.grad for p in potential.parameters() if p.grad is not None)]


def test_energies_and_forces(potential):
    def energy(positions):
        return potential(positions).sum()

    def inside(positions):
        e = energy(positions)
        return e, -torch.autograd.grad(e, positions, create_graph=True)[0]

    compiled = foregrad.compile(energy, backend="eager")

    def outside(positions):
        e = compiled(positions)
        return e, -torch.autograd.grad(e, positions, create_graph=True)[0]

    eager = gradients(potential, inside, (1, 1))
    same_bits(eager, gradients(potential, foregrad.compile(inside, backend="eager"), (1, 1)))
    close(eager, gradients(potential, outside, (1, 1)))


def test_a_transformer_encoder_in_eval_mode():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    compiled, x = foregrad.compile(encoder, backend="eager"), torch.randn(2, 5, 16)
    same_bits([encoder(x)], [compiled(x)])
    with torch.no_grad():
        close(encoder(x), compiled(x))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            same_bits([encoder(x)], [compiled(x)])
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


MATRIX = torch.linspace(-1, 1, 16).view(4, 4)
HESSIANS = {
    "powers": lambda v: torch.tanh(MATRIX @ v).pow(3).sum(),
    "softmax": lambda v: (torch.softmax(MATRIX @ v, 0) * v).sum(),
    "a quadratic form": lambda v: v @ MATRIX @ v,
    "shared values": lambda v: ((h := torch.tanh(MATRIX @ v)) * h * h.exp()).sum(),
    "products": lambda v: (v.sin() * v.cos() * v).sum(),
}


@pytest.mark.parametrize("name", HESSIANS)
def test_hessians(name):
    function = HESSIANS[name]
    hessian = torch.autograd.functional.hessian
    outside = foregrad.compile(function, backend="eager")
    inside = foregrad.compile(lambda v: hessian(function, v), backend="eager")
    for seed in range(5):
        torch.manual_seed(seed)
        v = torch.randn(4)
        same_bits([hessian(function, v)] * 2, [hessian(outside, v), inside(v)])


def test_a_hessian_through_prod():
    compiled = foregrad.compile(lambda v: v.prod(), backend="eager")
    v = torch.tensor([0.3, -1.2, 0.7, 2.0])
    close(torch.autograd.functional.hessian(lambda v: v.prod(), v), torch.autograd.functional.hessian(compiled, v))
