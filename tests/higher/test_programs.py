"""Programs that differentiate more than once train alike, compiled and in eager."""

from __future__ import annotations

import functools

import pytest
import torch

import foregrad
from tests.higher.programs import PROGRAMS, D, Equivariant


@pytest.mark.parametrize("name", PROGRAMS)
def test_twenty_steps_are_those_of_eager(name):
    results = []
    for compile in (lambda f: f, functools.partial(foregrad.compile, backend="eager")):
        torch.manual_seed(0)
        results.append(PROGRAMS[name](compile, 20))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_the_equivariant_network_is_one():
    """Turned and moved atoms have the same energy, and forces that turn along."""
    torch.manual_seed(0)
    net, x = Equivariant(), torch.randn(5, 3, dtype=D)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=D)).Q
    turn = turn * turn.det().sign()
    step = foregrad.value_and_grad(net, backend="eager")
    (energy, forces), (turned_energy, turned_forces) = step(x), step(x @ turn.T + 3.0)
    assert forces.norm() > 1e-3
    torch.testing.assert_close(turned_energy, energy)
    torch.testing.assert_close(turned_forces, forces @ turn.T)
