"""Reports say what runs: the peak that is simulated and measured, what is saved, what is computed again."""

from __future__ import annotations

import io

import pytest
import torch

import foregrad
from foregrad.budget.within import Frontier, can_replay
from foregrad.errors import PartitionError
from foregrad.partitioners.costs import flops
from foregrad.partitioners.index import JointIndex, merge_equal
from tests.budget.test_budget import MODELS, built, stepper
from tests.parity.peak import peak_of


def joint_of(name):
    module, x = built(name)
    return foregrad.capture(lambda x: module(x).square().mean(), x)


@pytest.mark.parametrize("name", MODELS)
def test_a_report_of_a_plan_is_what_was_planned(name):
    joint = joint_of(name)
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    merge_equal(index)
    index.replays = can_replay(index)
    plans = Frontier(index)
    for fraction in (0.0, 0.3, 1.0):
        plan = plans.best(plans.bytes_of(fraction))
        report = foregrad.partition(joint, memory_budget=fraction).report()
        # Of batch norms that run again the halves show up to a number's bytes less than the plan foresaw.
        assert 0 <= plan.peak - report.peak <= (16 if name == "convolutions" else 0)
        assert report.saved_bytes == plan.liveness.saved_bytes
        assert report.flops == sum(flops(index.nodes[i]) for i in plan.again)
        assert report.cost == plan.costs
        assert max(live for _, live in (*report.forward, *report.backward)) == report.peak


@pytest.mark.parametrize("partition", ["default", "min_cut", foregrad.nothing_saveable, foregrad.dots_saveable])
def test_a_report_of_any_partition_is_what_an_allocator_measures(partition):
    module, x = built("encoder")
    step = stepper(module, x, partition=partition)

    def whole():
        for parameter in module.parameters():
            parameter.grad = None
        step()

    for parameter in module.parameters():
        parameter.grad = None
    joint = joint_of("encoder")
    report = foregrad.partition(joint, partition).report()
    whole()
    for parameter in module.parameters():
        parameter.grad = None
    assert peak_of(whole) == pytest.approx(report.peak, rel=0.02)


def test_a_report_names_the_users_lines_and_names():
    weight = torch.randn(64, 64, requires_grad=True)

    def f(x):
        hidden = foregrad.checkpoint_name((x @ weight).sin(), "hidden")
        return (hidden @ weight).exp().sum()

    joint = foregrad.capture(f, torch.randn(128, 64))
    report = foregrad.partition(joint, foregrad.save_only_these_names("hidden")).report()
    (kept,) = [value for value in report.saved if value.kind == "saved"]
    assert (kept.name, kept.names, kept.nbytes) == ("sin", ("hidden",), 128 * 64 * 4)
    assert 'hidden = foregrad.checkpoint_name((x @ weight).sin(), "hidden")' in kept.line
    assert [one.name for one in report.recomputed] == ["mm_1", "exp", "mm"]
    assert report.flops == 2 * 2 * 128 * 64 * 64
    text = str(report)
    assert "32.0 KiB  saved  sin        f32[128, 64]  hidden  test_report.py" in text
    assert "computed again in the backward" in text
    assert text.count("|") == 2
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, file=io.StringIO())
    console.print(report)
    assert "hidden" in console.file.getvalue()


def test_a_report_of_a_function_without_gradients_saves_nothing():
    report = foregrad.partition(foregrad.capture(torch.sin, torch.ones(4))).report()
    assert (report.saved, report.recomputed) == ((), ())
    assert report.peak == 16


def test_a_report_with_symbolic_sizes_estimates():
    x = torch.ones(6, 5, requires_grad=True)
    foregrad.mark_dynamic(x, 0)
    seen = []

    def partition(module, inputs, **arguments):
        return foregrad.default_partition(module, inputs, **arguments)

    compiled = foregrad.compile(lambda x: x.sin().exp().sum(), backend="eager", partition=partition)
    compiled(x).backward()
    seen = compiled.foregrad.specializations[0].product.compiled.partitioned.report()
    assert seen.saved_bytes == 6 * 5 * 4
    assert "saved" in str(seen)


def test_pareto_is_the_curve_that_budgets_choose_from():
    module, x = built("residual")
    found = foregrad.pareto(lambda x: module(x).square().mean(), x)
    joint = joint_of("residual")
    assert [p.budget for p in found.points] == sorted({p.budget for p in found.points}, reverse=True)
    assert [p.cost for p in found.points] == sorted({p.cost for p in found.points})
    for point in found.points[:: max(1, len(found.points) // 5)]:
        report = foregrad.partition(joint, memory_budget=point.budget).report()
        assert (report.peak, report.cost, report.flops) == (point.budget, point.cost, point.flops)
        assert report.saved_bytes == point.saved_bytes
    data = found.data()
    assert data["budget"] == [p.budget for p in found.points]
    assert data["overhead"][0] == 0
    assert str(found).count("\n") >= 5
    assert "more work" in str(found)


def test_pareto_of_a_function_without_gradients_is_refused():
    with pytest.raises(PartitionError, match="has no backward"):
        foregrad.pareto(torch.sin, torch.ones(3))
