"""Plans of many equal layers: what is simulated on the whole graph, and what the pieces of a plan foretell of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.budget import uniform
from foregrad.budget.search import Search
from foregrad.budget.within import Frontier
from foregrad.partitioners.index import JointIndex


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def index_of(layers):
    module = nn.Sequential(*(Block() for _ in range(layers)))
    joint = foregrad.capture(lambda x: module(x).square().mean(), torch.randn(256, 16))
    return JointIndex(joint.module, joint.signature.num_forward_outputs)


def counted(monkeypatch):
    """How many nodes were looked at while plans were simulated."""
    seen = []
    measure = uniform.measure

    def counting(space, residuals, moved=(), price=0.0, excerpt=None):
        seen.append(len(space.index if excerpt is None else excerpt.nodes))
        return measure(space, residuals, moved, price, excerpt)

    monkeypatch.setattr(uniform, "measure", counting)
    return seen


def test_four_times_the_layers_do_not_take_four_times_the_simulation(monkeypatch):
    work = {}
    for layers in (16, 64):
        seen = counted(monkeypatch)
        plans = Frontier(index_of(layers))
        plans.best(plans.bytes_of(0.4))
        work[layers] = sum(seen)
        monkeypatch.undo()
    assert work[64] < 3 * work[16]


def test_segments_measured_on_a_part_are_those_of_the_whole(monkeypatch):
    parts = Frontier(index_of(40)).space
    assert len(parts._telling_blocks(1)) < parts.blocks.count
    monkeypatch.setattr(uniform.Space, "_telling_blocks", lambda space, length: range(space.blocks.count))
    whole = Frontier(index_of(40)).space
    assert {(s.start, s.stop, s.saves, s.costs) for s in parts.segments} == {
        (s.start, s.stop, s.saves, s.costs) for s in whole.segments
    }
    needs = [{(s.start, s.stop, s.plan): s.needs for s in space.segments} for space in (parts, whole)]
    assert all(abs(needs[0][key] - need) <= 0.02 * need for key, need in needs[1].items())


@pytest.mark.parametrize("layers", [12, 40])
def test_what_segments_foretell_is_what_their_plan_takes(layers):
    space = Frontier(index_of(layers)).space
    search = Search(space)
    least, leanest = search.least(space.plans[0].peak)
    budgets = [least + k * (space.plans[0].peak - least) // 6 for k in range(1, 7)]
    for row in [leanest, *search.rows(budgets)]:
        plan = space.assemble(row)
        assert plan.costs == sum(segment.costs for segment in row)
        assert plan.peak >= sum(segment.saves for segment in row)
    assert space.assemble(leanest).peak <= 1.02 * least


def test_a_plan_is_measured_when_it_is_asked_for(monkeypatch):
    seen = counted(monkeypatch)
    plans = Frontier(index_of(40))
    before = len(seen)
    plans.best(plans.bytes_of(0.5))
    assert len(seen) - before <= 10
    assert len(plans.plans) > 15
