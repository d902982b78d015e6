"""Calls that make random generators run eagerly by name: each draws the numbers that eager draws."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Generator, nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError


def several_draws(x):
    g = torch.Generator()
    return x * torch.rand(3, generator=g), torch.randperm(5, generator=g), torch.empty(3).normal_(generator=g)


def seeded(x):
    g = torch.Generator()
    g.manual_seed(3)
    return x * torch.rand(3, generator=g), g.initial_seed()


def branches(x):
    a = torch.rand(3, generator=torch.Generator())
    return a * x if a.sum() > 1 else a - x


def initialized(x):
    made = nn.Parameter(torch.empty(3))
    nn.init.normal_(made, generator=torch.Generator())
    return made * x


def seeds_late(x):
    g = torch.Generator()
    y = torch.rand(3, generator=g)
    g.manual_seed(3)
    return x * y


def beside_the_default(x):
    return torch.rand(3) + x, torch.rand(3, generator=torch.Generator()), torch.rand(2)


PROGRAMS = {
    "one draw": lambda x: x * torch.randn(3, generator=torch.Generator()),
    "by its device": lambda x: x * torch.rand(3, generator=torch.Generator(device="cpu")),
    "two of them": lambda x: (
        x * torch.rand(3, generator=torch.Generator()) + torch.rand(3, generator=torch.Generator())
    ),
    "several draws": several_draws,
    "seeded": seeded,
    "seeded at once": lambda x: x * torch.rand(3, generator=torch.Generator().manual_seed(4)),
    "a branch on what it draws": branches,
    "initialization": initialized,
    "beside the default one": beside_the_default,
    "by an imported name": lambda x: x * torch.rand(3, generator=Generator()),
    "seeded when it was drawn from": seeds_late,
    "told apart": lambda x: x if isinstance(torch.Generator(), torch.Generator) else -x,
}


def flat(result):
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs_eagerly_by_name(name):
    f, sides = PROGRAMS[name], []
    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    for g in (f, compiled):
        torch.manual_seed(0)
        seen = []
        with pytest.warns(ForegradWarning, match="makes a random generator") if g is compiled else nullcontext():
            for _ in range(3):
                x = torch.ones(3, requires_grad=True)
                results = flat(g(x))
                seen += [*results, *torch.autograd.grad(results[0].sum(), x)]
        sides.append(seen)
    torch.testing.assert_close(sides[1], sides[0], rtol=0, atol=0)
    with pytest.raises(UnsupportedSideEffectError, match=r"test_generators_made_inside.py.* makes a random generator"):
        foregrad.capture(f, torch.ones(3))
    assert torch.Generator is Generator


def test_one_from_outside_goes_on():
    generator = torch.Generator()
    g = foregrad.compile(lambda x: x * torch.rand(3, generator=generator), backend="eager")
    found = [g(torch.ones(3)) for _ in range(3)]
    generator.manual_seed(generator.initial_seed())
    torch.testing.assert_close(found, [torch.rand(3, generator=generator) for _ in range(3)], rtol=0, atol=0)
