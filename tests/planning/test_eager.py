"""The choice 'eager': what the program needs when PyTorch runs it, recorded on a copy without memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.planning import fake_ranks
from tests.parity.peak import peak_of
from tests.planning.networks import Net

ON_GPU = {"optimizer": "AdamW", "device": "h100"}


class Checkpointed(Net):
    """Layers under PyTorch's own checkpointing."""

    def forward(self, x, labels):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x), labels)


def absent(batch=256, kind=Net):
    with torch.device("meta"):
        return kind(), torch.empty(batch, 64), torch.zeros(batch, dtype=torch.long)


def there(kind=Net, batch=512):
    torch.manual_seed(0)
    return kind(activation=nn.functional.relu), torch.randn(batch, 64), torch.zeros(batch, dtype=torch.long)


def eager(plan):
    found = plan.choice("eager")
    assert found.memory is not None, found.why_not
    return found


@pytest.mark.parametrize("kind", [Net, Checkpointed])
def test_the_peak_is_that_of_a_step_by_eager(kind):
    model, x, labels = there(kind)
    plan = foregrad.plan(model, x, labels, device="cpu", optimizer="SGD")

    def step():
        model(x, labels).backward()
        model.zero_grad()

    step()
    gc.collect()
    assert eager(plan).peak - plan.standing.total == pytest.approx(peak_of(step), rel=0.02)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 32, 2), nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.layers(x)[0]).square().mean()


class Picking(nn.Module):
    """Its derivative adds into zeros, in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(self.first(x)[torch.arange(len(x)) % 7]).index_select(0, torch.arange(5)).square().sum()


class Summing(nn.Module):
    """Autograd adds its gradients in place: nobody else holds them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x):
        found = self.first(x)
        found = found * found
        return sum(found[:, at].exp().sum() for at in range(4))


class Sharing(Summing):
    """Autograd's sums are new memories: an expanded gradient, and gradients that are one tensor."""

    def forward(self, x):
        found = self.first(x)
        return (found + found).sum() + found.exp().mean() + (found + x).sin().sum()


class Converting(nn.Module):
    """Its derivative multiplies numbers of two dtypes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        found = self.layer(x)
        return (found.softmax(1) * (found > 0).long()).sum().square()


class Bags(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(256, 32, mode="sum", sparse=sparse), nn.Linear(32, 8)

    def forward(self, x):
        at = (x[:, :8].abs() * 50).long().clamp(0, 255).flatten()
        return self.head(self.table(at, torch.arange(0, at.numel(), 8))).square().mean()


CONVOLUTIONS = nn.Sequential(
    nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
)


@pytest.mark.parametrize("partition", ["eager", "default", "min_cut"])
@pytest.mark.parametrize("make", [Recurrent, Picking, Summing, Sharing, Converting, Bags, lambda: CONVOLUTIONS])
def test_kernels_with_workspaces(make, partition):
    torch.manual_seed(0)
    model, x = make(), torch.randn(64, 32)
    if make is Recurrent:
        x = x.expand(16, 64, 32).contiguous()

    def loss(x):
        return model(x).square().sum()

    plan = foregrad.plan(loss, x, device="cpu", policies={"default": "default", "min_cut": "min_cut"})
    call = loss if partition == "eager" else foregrad.compile(loss, backend="eager", partition=partition)

    def step():
        call(x).backward()
        model.zero_grad()

    step()
    step()
    gc.collect()
    found = plan.choice(partition)
    assert found.memory is not None, found.why_not
    assert found.peak - plan.standing.total == pytest.approx(peak_of(step), rel=0.005)


def test_sparse_gradients_have_the_memory_of_their_values():
    model, x = Bags(sparse=True), torch.randn(64, 32)
    plan = foregrad.plan(model, x, device="cpu")
    compiled = foregrad.compile(model, backend="eager")

    def step():
        compiled(x).backward()
        model.zero_grad()

    step()
    step()
    gc.collect()
    assert plan.choice("save all").peak - plan.standing.total == pytest.approx(peak_of(step), rel=0.02)
    assert "sparse gradient" in plan.choice("eager").why_not
    with torch.device("meta"):
        absent = foregrad.plan(Bags(sparse=True), torch.empty(64, 32), device="h100")
    assert absent.choice("save all").memory.gradients >= 64 * 8 * 32 * 4


def test_a_value_that_the_program_holds_is_there_until_it_returns():
    weight = torch.ones(64, requires_grad=True)

    def loss(x):
        first = x.exp()
        mean = first.mean(0)
        second = x.sin()
        return (mean * weight).sum() + (second.mean(0) * weight).sum()

    x = torch.randn(4096, 64)
    plan = foregrad.plan(loss, x, device="h100")
    held = x.numel() * 4
    assert eager(plan).peak - plan.choice("save all").peak == pytest.approx(held, rel=0.05)


def test_the_program_and_its_surroundings_are_as_before():
    model, x, labels = there()
    model.register_buffer("seen", torch.zeros(()))
    model.calls = 0

    def count(module, _):
        module.calls += 1
        module.seen.add_(1)

    model.register_forward_pre_hook(count)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state(), [p._version for p in model.parameters()]
    eager(foregrad.plan(model, x, labels, **ON_GPU))
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert [p._version for p in model.parameters()] == before[1]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_checkpointing_runs_again_what_it_says():
    model, x, labels = absent(4096, Checkpointed)
    plan = foregrad.plan(model, x, labels, **ON_GPU)
    each = plan.choice("checkpoint each layer")
    assert eager(plan).again_flops == pytest.approx(each.again_flops, rel=0.5)
    assert each.peak <= eager(plan).peak < plan.choice("save all").peak
    assert eager(plan).seconds > plan.choice("save all").seconds


def module_alone(model):
    return lambda x, labels: model(x, labels)


class Holder:
    def __init__(self, model):
        self.model = model

    def loss(self, x, labels):
        return self.model(x, labels)


HEAD = nn.Linear(64, 8)
MODELS = {"head": nn.Linear(64, 8, device="meta")}


@pytest.mark.parametrize("make", [module_alone, lambda model: Holder(model).loss])
def test_a_function_is_run_over_copies_of_its_modules(make):
    model, x, labels = absent(4096)
    whole = foregrad.plan(model, x, labels, **ON_GPU)
    found = foregrad.plan(make(model), x, labels, **ON_GPU)
    assert eager(found).peak == eager(whole).peak
    assert {row.module for row in eager(found).memory.at_peak} >= {"layers.*.up"}


def test_a_module_among_the_globals():
    def loss(x):
        return HEAD(x).sum()

    found = foregrad.plan(loss, torch.randn(128, 64), device="h100")
    assert eager(found).peak == pytest.approx(found.choice("save all").peak, rel=0.1)
    assert HEAD.weight.grad is None


def test_a_module_that_a_copy_does_not_reach_is_left_alone():
    found = foregrad.plan(lambda x: MODELS["head"](x).sum(), torch.empty(128, 64, device="meta"), device="h100")
    assert "in a way that a copy of it does not follow: pass the module" in found.choice("eager").why_not
    assert MODELS["head"].weight.grad is None


def test_what_does_not_run_without_values_says_so():
    class Asking(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * sum(torch.ones(3, device=x.device).tolist())

    x = torch.randn(8, 64)
    found = foregrad.plan(Asking(64, 8), x, device="h100")
    one = found.choice("eager")
    assert one.memory is None
    assert "does not run on tensors without values: RuntimeError: Tensor.item() cannot be called" in one.why_not
    assert "eager: it does not run" in str(found)
    assert found.best is not None


def test_numbers_that_the_capture_knows_are_known_to_it():
    layer, x = nn.Linear(64, 8), torch.ones(128, 64)

    def branching(x):
        for _ in range(2):
            x = layer(x) @ layer.weight if x.sum() > 0 else x * int(x.max())
        return x.sum()

    plan = foregrad.plan(branching, x, device="h100")
    assert eager(plan).peak == pytest.approx(plan.choice("save all").peak, rel=0.2)


def test_values_that_are_said_are_given_to_it():
    layer, x = nn.Linear(8, 8, device="meta"), torch.empty(64, 8, device="meta")

    def picked(x):
        return layer(x[x[:, 0] > 0]).sum() * x.sum().item()

    line = f"test_eager.py:{picked.__code__.co_firstlineno + 1}"
    plan = foregrad.plan(picked, x, device="h100", sizes={line: [32, 0.5]})
    assert eager(plan).peak == pytest.approx(plan.choice("save all").peak, rel=0.1)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [Net, Checkpointed])
def test_shards_are_gathered_as_in_the_other_choices(kind, reshard):
    model, x, labels = absent(64, kind)
    plan = foregrad.plan(model, x, labels, **ON_GPU, mesh={"fsdp": 4, "reshard": reshard})
    found, beside = eager(plan).memory, plan.choice("save all" if kind is Net else "checkpoint each layer").memory
    assert found.gradients == beside.gradients
    assert found.peak == pytest.approx(beside.peak, rel=0.08)
    assert set(plan.reserved("eager").by_stream) == {0, 1, 2}


def test_a_model_that_fully_shard_has_changed():
    pytest.importorskip("torch.distributed.fsdp")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x, labels = absent()
    expected = eager(foregrad.plan(model, x, labels, **ON_GPU, mesh={"fsdp": 8}))
    with fake_ranks(8, 0):
        mesh = init_device_mesh("cpu", (8,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        found = foregrad.plan(fully_shard(model, mesh=mesh), x, labels, **ON_GPU)
    assert eager(found).peak == expected.peak


def test_parts_of_operators_under_checkpointing():
    """As torchtitan trains: DTensor's collectives are inside the checkpointed layers."""
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x, labels = absent(4096, Checkpointed)
    with fake_ranks(8, 0):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("fsdp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        plan = foregrad.plan(model, x, labels, **ON_GPU, mesh=mesh)
    assert eager(plan).peak == pytest.approx(plan.choice("checkpoint each layer").peak, rel=0.25)
    assert eager(plan).peak < plan.choice("save all").peak


def test_the_result_of_a_collective_is_one_memory_up_to_its_last_reader():
    """PyTorch wraps it until somebody waits; on `meta` the wrapped tensor is a copy."""
    pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer, x = nn.Linear(64, 8, device="meta"), torch.empty(512, 64, device="meta")
    with fake_ranks(8, 0):
        parallelize_module(layer, init_device_mesh("cpu", (8,)), ColwiseParallel(input_layouts=Shard(0)))
        found = eager(foregrad.plan(lambda x: layer(x).sum(), x, **ON_GPU)).memory
    gathered = 8 * 512 * 64 * 4
    assert [size for _, size, _ in found.script.events()].count(gathered) == 1
    assert found.saved >= gathered


def test_the_largest_batch_by_eager():
    model, x, labels = absent()
    plan = foregrad.plan(model, x, labels, **ON_GPU)
    found = plan.largest(under="4 MiB", choice="eager")
    for size in (found.size, found.size + 1):
        other = absent(size)
        peak = eager(foregrad.plan(model, *other[1:], **ON_GPU)).peak
        assert (peak <= 4 << 20) == (size == found.size)
    assert plan.largest(under="4 MiB").choice != "eager"
