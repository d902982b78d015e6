"""A pipeline's stage: micro-batches between their forward and their backward, beside an allocator's reports."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import PlanError
from tests.covering import each
from tests.parity.peak import peak_of

WIDTH, BATCH = 64, 256
POLICIES = {"save all": foregrad.everything_saveable, "min cut": "min_cut"}


def stage() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers)


def received() -> tuple[torch.Tensor, torch.Tensor]:
    """What a stage gets from its neighbours: values, and their gradient."""
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


@pytest.mark.parametrize(("flight", "choice"), each([(1, 4), (2, 4), (4, 4), (4, 8)], POLICIES, times=2))
def test_the_peak_of_a_stage_is_the_allocators(flight, choice):
    in_flight, total = flight
    model = stage()

    def loss(x, gradient):
        return (model(x) * gradient).sum()

    plan = foregrad.plan(loss, *received(), optimizer="SGD", device="cpu")
    compiled = foregrad.compile(loss, backend="eager", partition=POLICIES[choice])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        waiting = []
        for _ in range(total):  # 1F1B; with all in flight, GPipe
            inputs = received()
            waiting.append((compiled(*inputs), inputs))
            del inputs
            if len(waiting) == in_flight:
                waiting.pop(0)[0].backward()
        while waiting:
            waiting.pop(0)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    foreseen = plan.in_flight(in_flight, choice) - (plan.standing.total - plan.standing.arguments)
    assert foreseen == pytest.approx(peak_of(step), rel=0.02)


def test_stages_that_are_not_planned():
    model, (x, gradient) = stage(), received()

    def loss(x):
        return (model(x) * gradient).sum()

    with pytest.raises(PlanError, match="at least one micro-batch is in flight, not 0"):
        foregrad.plan(loss, x, device="cpu").in_flight(0)
    with pytest.raises(PlanError, match="a pipeline's stage on fsdp 4 is not planned"):
        foregrad.plan(loss, x, device="cpu", mesh={"fsdp": 4}).in_flight(2, "save all")
