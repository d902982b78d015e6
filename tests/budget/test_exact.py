"""The integer program: its bound is below every plan, its plans keep to the budget, and ours are as good."""

from __future__ import annotations

import itertools

import pytest
import torch

import foregrad
from foregrad.budget.exact import improved
from foregrad.budget.search import _candidates
from foregrad.budget.uniform import measure
from foregrad.budget.within import Frontier
from foregrad.partitioners.index import JointIndex, merge_equal

pytest.importorskip("highspy")


def weights(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(a, b, generator=generator, requires_grad=True) for a, b in itertools.pairwise(sizes)]


WIDENING = weights(16, 32, 48, 16, 32)


def widening(x):
    for k, weight in enumerate(WIDENING):
        x = (x @ weight).sin().exp() if k % 2 else (x @ weight).tanh()
    return x.sum()


SKIPPING = weights(16, 16, 16, 16, 16)


def skipping(x):
    kept = []
    for weight in SKIPPING[:2]:
        x = (x @ weight).sin()
        kept.append(x)
    for weight in SKIPPING[2:]:
        x = (x @ weight).exp() * kept.pop()
    return x.sum()


BRANCHING = weights(16, 64, 16, 16, 16)


def branching(x):
    a, b, c, d = BRANCHING
    hidden = (x @ a).sin()
    return ((hidden @ b).tanh() * ((x @ c).exp() @ d)).sum() + hidden.cos().mean()


NORMALIZING = weights(16, 32, 16)


def normalizing(x):
    for weight in NORMALIZING:
        x = torch.nn.functional.layer_norm(x @ weight, (weight.shape[1],)).relu()
    return x.sum()


REUSING = weights(16, 16, 16)


def reusing(x):
    first = (x @ REUSING[0]).exp()
    second = (first @ REUSING[1]).sin() + first
    return (second * first).tanh().sum()


PROGRAMS = [widening, skipping, branching, normalizing, reusing]


def plans_of(f):
    joint = foregrad.capture(f, torch.ones(256, 16))
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    merge_equal(index)
    return Frontier(index)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_the_plan_is_within_two_percent_of_the_proved_optimum(program):
    plans = plans_of(program)
    proved = 0
    for fraction in (0.0, 0.25, 0.5, 0.75):
        budget = plans.bytes_of(fraction)
        plan = plans.best(budget)
        better, proof = improved(plans.space, plan, budget, 20)
        assert better.peak <= budget
        assert proof.bound <= better.costs <= plan.costs
        if better.costs <= 1.02 * proof.bound:
            proved += 1
            assert plan.costs <= 1.02 * proof.bound
    assert proved == 4


@pytest.mark.parametrize("program", [branching, reusing], ids=lambda f: f.__name__)
def test_no_choice_beats_the_bound(program):
    """Every choice of what to save, simulated, against the program's bound and its plan."""
    plans = plans_of(program)
    space = plans.space
    free = list(_candidates(space))
    assert len(free) <= 12
    every = [measure(space, c) for k in range(len(free) + 1) for c in itertools.combinations(free, k)]
    for fraction in (0.0, 0.3, 0.6):
        budget = plans.bytes_of(fraction)
        optimum = min(plan.costs for plan in every if plan.peak <= budget)
        worst = max((plan for plan in every if plan.peak <= budget), key=lambda plan: plan.costs)
        found, proof = improved(space, worst, budget, 20)
        assert proof.bound <= optimum
        assert found.costs <= 1.02 * optimum


def test_a_report_prints_what_is_proved():
    joint = foregrad.capture(widening, torch.ones(256, 16))
    report = foregrad.partition(joint, memory_budget=foregrad.Budget(0.3, solver_seconds=20)).report()
    assert report.budget.proof.gap <= 0.02
    assert "  budget " in str(report)
    assert "optimum" in str(report)
    plain = foregrad.partition(joint, memory_budget=0.3).report()
    assert plain.budget.proof is None
    assert plain.budget.budget == report.budget.budget
    small = foregrad.capture(lambda x: x.sin().exp().tanh().sum(), torch.ones(99, requires_grad=True))
    assert "proved to be the optimum" in str(foregrad.partition(small, memory_budget=0.2).report())


def test_a_graph_too_large_for_the_program_is_left_as_it_is():
    def long(x):
        for _ in range(150):
            x = x.sin().exp()
        return x.sum()

    joint = foregrad.capture(long, torch.ones(99, requires_grad=True))
    plain = foregrad.partition(joint, memory_budget=0.3)
    solved = foregrad.partition(joint, memory_budget=foregrad.Budget(0.3, solver_seconds=1))
    assert solved.saved == plain.saved
    assert "no bound was found" in str(solved.report())


def test_results_under_a_proved_plan_are_eagers():
    x = torch.linspace(0, 1, 256 * 16).view(256, 16)
    budget = foregrad.Budget("40 KiB", solver_seconds=5)
    with pytest.raises(foregrad.errors.BudgetError):
        foregrad.compile(widening, backend="eager", memory_budget=budget)(x)
    compiled = foregrad.compile(widening, backend="eager", memory_budget=foregrad.Budget(0.1, solver_seconds=5))
    assert torch.equal(compiled(x), widening(x))
    with pytest.raises(ValueError, match="no memory budget"):
        foregrad.compile(widening, memory_budget=foregrad.Budget("much"))
