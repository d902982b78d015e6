"""A memory budget is kept by the measured peak, costs as little as it can, and changes no bit of the results."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foregrad
from foregrad.api import pipeline_for
from foregrad.budget.blocks import find_blocks
from foregrad.budget.uniform import Space, find_repeats, measure
from foregrad.budget.within import Frontier, read_budget
from foregrad.errors import BudgetError, PartitionError
from foregrad.partitioners.classify import Kind
from foregrad.partitioners.costs import costs, flops
from foregrad.partitioners.cut import NEVER
from foregrad.partitioners.index import JointIndex
from foregrad.partitioners.liveness import Storages
from tests.covering import ALL
from tests.parity.peak import peak_of


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def chain():
    return nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(32, 32), nn.ReLU())))


def residual():
    return nn.Sequential(*(Block() for _ in range(6)))


def dropping():
    return nn.Sequential(*(part for _ in range(5) for part in (Block(), nn.Dropout(0.2))))


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def uneven():
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 16), nn.Tanh(), nn.Linear(16, 128), nn.GELU())


def convolutions():
    def block():
        return (nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.GELU())

    return nn.Sequential(nn.Unflatten(1, (2, 4, 4)), *(part for _ in range(4) for part in block()))


MODELS = {
    "chain": chain,
    "residual": residual,
    "dropping": dropping,
    "encoder": encoder,
    "uneven": uneven,
    "convolutions": convolutions,
}


def built(name):
    torch.manual_seed(0)
    module = MODELS[name]()
    return module, torch.randn(*((16, 32, 32) if name == "encoder" else (512, 32)))


def plans_of(name):
    module, x = built(name)
    joint = foregrad.capture(lambda x: module(x).square().mean(), x)
    return Frontier(JointIndex(joint.module, joint.signature.num_forward_outputs))


def stepper(module, x, **options):
    compiled = foregrad.compile(lambda x: module(x).square().mean(), backend="eager", **options)

    def step():
        for parameter in module.parameters():
            parameter.grad = None
        torch.manual_seed(3)
        loss = compiled(x)
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in module.parameters()]

    return step


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_keeps_to_each_budget_and_falls_with_it(name):
    module, x = built(name)
    plans = plans_of(name)
    plain = stepper(module, x)()
    peaks = []
    for k in range(5) if ALL else (0, 2, 4):
        budget = plans.bytes_of(k / 4)
        step = stepper(module, x, memory_budget=budget)
        found = step()
        assert torch.equal(found[0], plain[0])
        assert all(map(torch.equal, found[1], plain[1]))
        del found

        def dropping_gradients(step=step):
            for parameter in module.parameters():
                parameter.grad = None
            step()

        for parameter in module.parameters():
            parameter.grad = None
        peaks.append(peak_of(dropping_gradients))
        assert peaks[-1] <= budget + (16 if name == "convolutions" else 0)  # numbers in its kernel, on some processors
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_budget_never_has_a_larger_peak_nor_a_lower_cost(name):
    plans = plans_of(name)
    chosen = [plans.best(plans.bytes_of(k / 40)) for k in range(41)]
    assert [plan.peak for plan in chosen] == sorted(plan.peak for plan in chosen)
    assert [plan.costs for plan in chosen] == sorted((plan.costs for plan in chosen), reverse=True)
    assert plans.least < plans.most
    assert chosen[-1].costs == 0


def test_the_least_peak_of_a_chain_grows_with_the_root_of_its_length():
    """Of n values of a chain, a checkpoint every sqrt(n) and one stretch between two are alive (Chen et al., 2016)."""
    module = nn.Sequential(*(part for _ in range(64) for part in (nn.Linear(8, 8), nn.ReLU())))
    joint = foregrad.capture(lambda x: module(x).sum(), torch.randn(4096, 8))
    plans = Frontier(JointIndex(joint.module, joint.signature.num_forward_outputs))
    value = 4096 * 8 * 4
    assert plans.most > 64 * value
    assert plans.least < (2 * 8 + 4) * value + 2 * 64 * 72 * 4  # and the gradients


def test_equal_blocks_are_recognised():
    module, x = built("residual")
    joint = foregrad.capture(lambda x: module(x).square().mean(), x)
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    storages = Storages(index)
    blocks = find_blocks(index, storages, costs(index))
    classes = find_repeats(index, storages, blocks).classes
    assert blocks.count >= 6
    assert max(map(classes.count, classes)) >= 4  # of six: the ends have other neighbours


def test_a_block_that_differs_in_one_constant_is_of_another_class():
    def f(x):
        for scale in (2.0, 2.0, 3.0, 2.0):
            x = (x.sin() * scale).exp().sum(1, keepdim=True).expand(64, 64).cos()
        return x.sum()

    joint = foregrad.capture(f, torch.ones(64, 64, requires_grad=True))
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    storages = Storages(index)
    blocks = find_blocks(index, storages, costs(index))
    assert len(set(find_repeats(index, storages, blocks).classes)) > 1


@pytest.mark.parametrize("is_wide_first", [False, True])
def test_of_too_many_waists_those_are_kept_whose_values_are_dearest(is_wide_first):
    """A waist's value is saved, so the product that makes it does not run again: it had better be the large one."""

    def small(x):
        return x + (x @ square).tanh() @ square

    def large(x):
        return x + (x @ up).tanh() @ down

    def f(x):
        for _ in range(80):
            x = small(large(x)) if is_wide_first else large(small(x))
        return x.sum()

    square, up, down = torch.randn(8, 8), torch.randn(8, 64), torch.randn(64, 8)
    joint = foregrad.capture(f, torch.randn(16, 8, requires_grad=True))
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    plans = Frontier(index)
    blocks = plans.space.blocks
    assert 70 <= blocks.count <= 128
    widths = []
    for waist in blocks.waists[1:]:
        (value,) = waist
        node = index.nodes[value]
        if node.target is torch.ops.aten.add.Tensor:
            widths.append(node.args[1].args[0].meta["val"].shape[1])
    assert len(widths) >= 70
    assert widths.count(64) >= len(widths) - 1


def test_an_infeasible_budget_names_the_least_feasible():
    module, x = built("residual")
    least = plans_of("residual").least
    with pytest.raises(BudgetError, match=f"least feasible peak is {least} bytes") as caught:
        stepper(module, x, memory_budget=least - 1)()
    assert isinstance(caught.value, PartitionError)
    stepper(module, x, memory_budget=least)()


def test_every_door_takes_a_budget():
    module, x = built("residual")
    joint = foregrad.capture(lambda x: module(x).square().mean(), x)
    everything = foregrad.partition(joint, "budget", memory_budget=1.0).saved_bytes
    least = foregrad.partition(joint, memory_budget=0.0).saved_bytes
    assert least < everything / 2
    plain = stepper(module, x)()
    through = torch.compile(
        lambda x: module(x).square().mean(), backend="foregrad", options={"backend": "eager", "memory_budget": 0.0}
    )
    assert torch.equal(through(x), plain[0])
    compiled = foregrad.compile(module, backend="eager", memory_budget="1 GiB")
    assert torch.equal(compiled(x), module(x))
    halves = foregrad.budget_partition(
        joint.module, None, num_fwd_outputs=joint.signature.num_forward_outputs, memory_budget=0.5
    )
    assert len(halves) == 2


def test_a_second_derivative_under_a_budget():
    def f(x):
        for _ in range(6):
            x = (x.sin() * x).tanh()
        return x.sum()

    x = torch.linspace(0.1, 1.0, 64, requires_grad=True)
    want = [f(x)]
    have = [foregrad.compile(f, backend="eager", memory_budget=0.0)(x)]
    for _ in range(2):
        want += torch.autograd.grad(want[-1].sum(), x, create_graph=True)
        have += torch.autograd.grad(have[-1].sum(), x, create_graph=True)
    for a, b in zip(want, have, strict=True):
        torch.testing.assert_close(b, a)


def test_random_numbers_are_drawn_once_where_no_replay_is_asked_for():
    module, x = built("dropping")
    joint = foregrad.capture(lambda x: module(x).square().mean(), x)
    parts = foregrad.partition(joint, memory_budget=foregrad.Budget(0.0, replay=False))
    targets = [node.target for node in parts.backward.graph.nodes if node.op == "call_function"]
    assert not any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)


def test_a_policy_outranks_the_budget():
    ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    weight = torch.randn(64, 64, requires_grad=True)

    def region(x):
        for _ in range(4):
            x = (x @ weight).tanh()
        return x

    def f(x):
        contexts = lambda: create_selective_checkpoint_contexts(policy)
        return checkpoint(region, x, use_reentrant=False, context_fn=contexts).sum()

    joint = foregrad.capture(f, torch.randn(64, 64, requires_grad=True))
    tagged = [n for n in joint.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    parts = foregrad.partition(joint, memory_budget=0.0)
    names = {node.name for node in parts.backward.graph.nodes if node.op == "call_function"}
    assert not names & {node.name for node in tagged}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("600MiB", 600 << 20),
        ("1.5 GB", 1_500_000_000),
        ("7 B", 7),
        (" 2kB ", 2000),
        (0.5, 0.5),
        (12, 12),
        ("3 tib", 3 << 40),
    ],
)
def test_budgets_are_read(text, value):
    assert read_budget(text) == value
    assert type(read_budget(text)) is type(value)


@pytest.mark.parametrize("wrong", ["", "600", "many", "5 apples", "-3 MiB", True, None, 1.5, -0.1, -1, [3]])
def test_what_is_no_budget_is_a_value_error(wrong):
    with pytest.raises(ValueError, match="memory budget"):
        read_budget(wrong)


def test_a_budget_and_another_partition_do_not_go_together():
    with pytest.raises(ValueError, match="partition='min_cut' can't be asked for"):
        foregrad.compile(lambda x: x, partition="min_cut", memory_budget=3)
    with pytest.raises(ValueError, match="needs memory_budget="):
        foregrad.compile(lambda x: x, partition="budget")


def test_flops_are_those_of_torch():
    from torch.utils.flop_counter import FlopCounterMode

    conv, turned = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
    linear = nn.Linear(12, 7)

    def f(x, y, a):
        return turned(conv(x)).sum() + linear(y).sum() + torch.bmm(a, a).sum()

    args = torch.randn(2, 3, 8, 8), torch.randn(5, 12), torch.randn(3, 4, 4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        f(*args)
    with torch.no_grad():
        joint = foregrad.capture(f, *args)
    assert sum(map(flops, joint.graph.nodes)) == counter.get_total_flops()


def test_small_graphs_have_the_optimum():
    """Every choice of what to save is tried by hand; at no budget is any cheaper than ours, or lower than our least."""

    def f(x):
        wide = (x @ weight).sin()
        return (wide.cos() * (wide @ second).exp()).sum()

    weight, second = torch.randn(16, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    joint = foregrad.capture(f, torch.randn(128, 16))
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    plans = Frontier(index)
    storages = Storages(index)
    space = Space(index, storages, costs(index), find_blocks(index, storages, costs(index)))
    values = [
        i
        for i in range(len(index))
        if 0 < space.save[i] < NEVER and index.for_backward[i] and index.kinds[i] in (Kind.CHEAP, Kind.HEAVY)
    ]
    assert 4 <= len(values) <= 11
    choices = [choice for k in range(len(values) + 1) for choice in itertools.combinations(values, k)]
    every = [measure(space, choice) for choice in choices]
    assert plans.least == min(plan.peak for plan in every)
    for k in range(13):
        budget = plans.bytes_of(k / 12)
        assert plans.best(budget).costs == min(plan.costs for plan in every if plan.peak <= budget)


def test_under_a_budget_inductor_holds_no_buffers_for_later_ones():
    """It did by an estimate of its own: the measured peak was a tenth over the least budget of a GPT-2."""
    budgeted = pipeline_for(backend="inductor", memory_budget=0.5)
    assert budgeted.fw_compiler.settings == budgeted.bw_compiler.settings == {"allow_buffer_reuse": False}
    assert pipeline_for(backend="inductor").fw_compiler.settings == {}
    own = pipeline_for(backend="inductor", memory_budget=0.5, inductor_settings={"allow_buffer_reuse": True})
    assert own.fw_compiler.settings == {"allow_buffer_reuse": True}


def test_layers_compiled_one_by_one_hand_their_gradients_out_one_by_one():
    """Where gradients are added to those of earlier steps; one compiled call hands all of its gradients out at its end."""

    def accumulating(compile_parts):
        layers = [nn.Linear(128, 128) for _ in range(6)]
        parts = [foregrad.compile(layer, backend="eager") for layer in layers] if compile_parts else layers
        model = nn.Sequential(*parts)
        call = model if compile_parts else foregrad.compile(model, backend="eager")
        x = torch.randn(4, 128)
        for _ in range(2):
            call(x).sum().backward()
        return peak_of(lambda: call(x).sum().backward())

    gradient = 4 * 128 * 128
    assert accumulating(compile_parts=True) < 3 * gradient < 6 * gradient <= accumulating(compile_parts=False)
