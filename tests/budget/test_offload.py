"""Saved values may wait in host memory: results stay the same bit for bit, and the peak falls."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foregrad
from foregrad import checkpoint_name
from foregrad._torch.instead import OFFLOAD, RELOAD
from foregrad.errors import BudgetError
from foregrad.graph.meta import TensorSpec
from foregrad.partitioners.index import JointIndex
from foregrad.partitioners.policies import to_offload
from tests.budget.test_budget import MODELS, built, plans_of, stepper
from tests.covering import shared
from tests.parity.peak import peak_of

ALL = foregrad.Policy(lambda candidate: "offload")


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.ones(3).expand(4, 3),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.arange(9)[3:],
        torch.randn(4, dtype=torch.complex64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(7).bfloat16(),
    ],
)
def test_a_tensor_comes_back_as_it_went(x):
    host = OFFLOAD(x)
    found = RELOAD(host, x.device)
    assert torch.equal(found, x)
    assert found.stride() == x.stride()
    assert found.dtype is x.dtype
    assert host.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()


def test_the_operators_are_well_made():
    for x in (torch.randn(3, 4), torch.randn(4, 6)[:, ::2], torch.arange(3)):
        torch.library.opcheck(OFFLOAD, (x,), test_utils=("test_schema", "test_faketensor"))
        torch.library.opcheck(RELOAD, (x, torch.device("cpu")), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("name", "door"), [*((name, "foregrad") for name in MODELS), *((name, "torch") for name in shared(MODELS, 0, 3))]
)
def test_results_with_everything_offloaded_are_the_same(name, door):
    torch._dynamo.reset()
    module, x = built(name)
    plain = stepper(module, x)()
    if door == "foregrad":
        found = stepper(module, x, partition=ALL)()
    else:
        call = torch.compile(
            lambda x: module(x).square().mean(), backend="foregrad", options={"backend": "eager", "partition": ALL}
        )
        for parameter in module.parameters():
            parameter.grad = None
        torch.manual_seed(3)
        loss = call(x)
        loss.backward()
        found = loss.detach(), [parameter.grad for parameter in module.parameters()]
    assert torch.equal(found[0], plain[0])
    assert all(map(torch.equal, found[1], plain[1]))


@pytest.mark.parametrize("name", ["chain", "encoder"])
def test_the_peak_falls_and_is_the_predicted_one(name):
    module, x = built(name)
    step = stepper(module, x, partition=ALL)

    def whole():
        step()
        for parameter in module.parameters():
            parameter.grad = None

    whole()
    joint = foregrad.capture(lambda x: module(x).square().mean(), x)
    report = foregrad.partition(joint, ALL).report()
    everything = foregrad.partition(joint, "default").report()
    assert report.peak < 0.7 * everything.peak
    assert report.saved_bytes <= 64
    assert {value.kind for value in report.saved} >= {"offloaded", "input"}
    assert "more in host memory" in str(report)
    assert peak_of(whole) == pytest.approx(report.peak, rel=0.03)


def test_only_what_is_named_goes():
    weight = torch.randn(16, 16, requires_grad=True)

    def f(x):
        return (checkpoint_name((x @ weight).sin(), "act").exp() @ weight).tanh().sum()

    joint = foregrad.capture(f, torch.ones(8, 16))
    parts = foregrad.partition(joint, foregrad.offload_names("act"))
    parts.check()
    assert [node.name for node in parts.saved_nodes if node.op != "placeholder"] == ["sin_host"]
    assert "foregrad.reload.default(sin_host" in str(parts)
    both = foregrad.partition(joint, foregrad.offload_names("act", saved=["act"]))
    assert [node.name for node in both.saved_nodes if node.op != "placeholder"] == ["sin"]


def test_a_selective_policy_of_pytorchs_may_ask_for_it():
    weight = torch.randn(16, 16, requires_grad=True)

    def policy(ctx, op, *args, **kwargs):
        is_product = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def f(x):
        region = lambda x: (x @ weight).sin().exp()
        contexts = lambda: create_selective_checkpoint_contexts(policy)
        return checkpoint(region, x, use_reentrant=False, context_fn=contexts).tanh().sum()

    joint = foregrad.capture(f, torch.ones(8, 16))
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    assert to_offload(index) == set()  # on the CPU already
    (product,) = [i for i, node in enumerate(index.nodes) if node.name == "mm"]
    spec = index.nodes[product].meta["spec"]
    index.nodes[product].meta["spec"] = TensorSpec(spec.shape, spec.stride, spec.dtype, torch.device("cuda"))
    assert to_offload(index) == {product}


@pytest.mark.parametrize("name", shared(MODELS, 1, 2))
def test_a_budget_may_choose_it(name):
    module, x = built(name)
    plans = plans_of(name)
    plain = stepper(module, x)()
    recomputed = plans.best(plans.bytes_of(0.2))
    joint = foregrad.capture(lambda x: module(x).square().mean(), x)
    free = foregrad.partition(joint, memory_budget=foregrad.Budget(0.2, offload=0.001)).report()
    dear = foregrad.partition(joint, memory_budget=foregrad.Budget(0.2, offload=1e12)).report()
    assert free.peak <= plans.bytes_of(0.2)
    assert free.cost < recomputed.costs
    assert any(value.kind == "offloaded" for value in free.saved)
    assert not any(value.kind == "offloaded" for value in dear.saved)
    found = stepper(module, x, memory_budget=foregrad.Budget(0.2, offload=0.001))()
    assert torch.equal(found[0], plain[0])
    assert all(map(torch.equal, found[1], plain[1]))


def test_less_than_the_least_without_it_is_feasible_with_it():
    module, x = built("residual")
    plans = plans_of("residual")
    joint = foregrad.capture(lambda x: module(x).square().mean(), x)
    with pytest.raises(BudgetError):
        foregrad.partition(joint, memory_budget=plans.least - 1000)
    report = foregrad.partition(joint, memory_budget=foregrad.Budget(plans.least - 1000, offload=True)).report()
    assert report.peak < plans.least
    with pytest.raises(BudgetError, match="least feasible peak"):
        foregrad.partition(joint, memory_budget=foregrad.Budget(10, offload=True))


def test_a_second_derivative_of_a_function_that_offloads():
    def f(x):
        for _ in range(4):
            x = (x.sin() * x).tanh()
        return x.sum()

    x = torch.linspace(0.1, 1.0, 64, requires_grad=True)
    want, have = [f(x)], [foregrad.compile(f, backend="eager", partition=ALL)(x)]
    for _ in range(2):
        want += torch.autograd.grad(want[-1].sum(), x, create_graph=True)
        have += torch.autograd.grad(have[-1].sum(), x, create_graph=True)
    for a, b in zip(want, have, strict=True):
        torch.testing.assert_close(b, a)


def test_symbolic_sizes():
    compiled = foregrad.compile(lambda x: x.sin().exp().sum(), backend="eager", partition=ALL, dynamic=True)
    for count in (5, 7, 9):
        x = torch.linspace(0, 1, count, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x), x)
        (want,) = torch.autograd.grad(x.sin().exp().sum(), x)
        assert torch.equal(found, want)


@pytest.mark.slow
def test_inductor_runs_it():
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x = torch.randn(128, 32)
    compiled = foregrad.compile(lambda x: module(x).square().mean(), backend="inductor", partition=ALL)
    want = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
    for a, b in zip(torch.autograd.grad(compiled(x), list(module.parameters())), want, strict=True):
        torch.testing.assert_close(a, b)
