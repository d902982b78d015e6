"""One rank of many, without processes: `fully_shard`, DTensor's parts, copies; and the collectives of each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import PlanError
from foregrad.planning import Ranks, fake_ranks
from tests.planning.networks import Net

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

WHOLE = {"optimizer": "AdamW", "device": "h100"}


def absent(batch: int = 64):
    with torch.device("meta"):
        return Net(activation=nn.functional.relu), torch.empty(batch, 64), torch.zeros(batch, dtype=torch.long)


def split(model, mesh):
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Sum(nn.Sequential):
    def forward(self, x):
        return super().forward(x).sum()


def sharded(model, mesh, **settings):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def peaks(plan):
    return {one.name: one.peak for one in plan.choices}


def test_a_model_that_is_sharded_is_planned_as_one_that_will_be():
    model, x, labels = absent()
    expected = foregrad.plan(model, x, labels, **WHOLE, mesh={"fsdp": 8})
    with fake_ranks(8, 0):
        model = sharded(model, init_device_mesh("cpu", (8,)))
        before = [(type(m), {**m._forward_hooks}, {**m._parameters}) for m in model.modules()]
        found = foregrad.plan(model, x, labels, **WHOLE)
        largest = found.largest(under="2 MiB", choice="save all")
        after = [(type(m), {**m._forward_hooks}, {**m._parameters}) for m in model.modules()]
        assert all(a[:2] == b[:2] and all(a[2][k] is b[2][k] for k in a[2]) for a, b in zip(before, after, strict=True))
    assert (found.ranks.fsdp, found.ranks.dp, found.ranks.reshard) == (8, 1, True)
    assert (found.standing, found.collectives, found.trained) == (
        expected.standing,
        expected.collectives,
        expected.trained,
    )
    assert peaks(found) == peaks(expected)
    assert largest.size == expected.largest(under="2 MiB", choice="save all").size


@pytest.mark.parametrize("reshard", [True, False])
def test_settings_of_fully_shard_are_those_of_the_plan(reshard):
    model, x, labels = absent()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = Net(activation=nn.functional.relu).to("meta").to(torch.bfloat16)
    mesh = {"fsdp": 4, "dp": 2, "master_dtype": "float32", "reduce_dtype": "float32", "reshard": reshard}
    expected = foregrad.plan(half, x.to(torch.bfloat16), labels, **WHOLE, mesh=mesh)
    with fake_ranks(8, 0):
        grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "shards"))
        model = sharded(model, grid, mp_policy=policy, reshard_after_forward=reshard)
        found = foregrad.plan(model, x, labels, **WHOLE)
    assert (found.ranks.fsdp, found.ranks.dp, found.ranks.reshard) == (4, 2, reshard)
    assert found.standing.parameters == expected.standing.parameters
    assert [one.nbytes for one in found.collectives] == [one.nbytes for one in expected.collectives]
    cast = 64 * 64 * 2  # the argument once more, in half precision
    assert found.choice("save all").peak == pytest.approx(expected.choice("save all").peak, abs=2 * cast)


def test_modules_that_are_sharded_as_one_are_gathered_as_one():
    model, x, labels = absent()
    each = foregrad.plan(model, x, labels, **WHOLE, mesh={"fsdp": 8})
    with fake_ranks(8, 0):
        found = foregrad.plan(fully_shard(model, mesh=init_device_mesh("cpu", (8,))), x, labels, **WHOLE)
    assert found.collectives[0].count == 1
    assert found.choice("save all").peak > each.choice("save all").peak


def test_parts_of_operators_are_a_ranks_own():
    model, x, labels = absent()
    whole = foregrad.plan(model, x, labels, **WHOLE)
    with fake_ranks(8, 0):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        found = foregrad.plan(split(model, mesh), x, labels, **WHOLE, mesh=mesh)
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    assert found.standing.parameters == 4 * local
    assert found.standing.optimizer == 8 * local
    assert found.trained == whole.trained
    assert whole.total.flops / 8 < found.total.flops < whole.total.flops / 7
    (reduced,) = found.collectives
    # Of each layer's results in the forward, and of what its gradient is with respect to in the backward.
    assert (reduced.name, reduced.count) == ("all reduce in the graph, 8 ranks", 8)
    assert reduced.nbytes == 8 * 2 * (64 * 64 * 4) * 7 // 8
    assert reduced.seconds == pytest.approx(reduced.nbytes / (450e9 * 0.75), rel=0.1)


def test_a_parameter_whose_gradient_has_another_layout_is_trained():
    """DTensor makes the gradient of an embedding that is split by rows whole."""
    words, head = nn.Embedding(1024, 64, device="meta"), nn.Linear(64, 1, device="meta")
    tokens = torch.zeros(32, dtype=torch.long, device="meta")
    with fake_ranks(8, 0):
        parallelize_module(words, init_device_mesh("cpu", (8,)), RowwiseParallel(input_layouts=Replicate()))
        found = foregrad.plan(Sum(words, head), tokens, **WHOLE)
    assert found.trained == 1024 * 64 + 65
    assert found.standing.optimizer == 8 * (1024 * 64 // 8 + 65)


def test_ranks_on_several_hosts_take_the_network():
    model, x, labels = absent()
    with fake_ranks(16, 0):
        mesh = init_device_mesh("cpu", (16,), mesh_dim_names=("tp",))
        (found,) = foregrad.plan(split(model, mesh), x, labels, **WHOLE).collectives
    assert found.seconds == pytest.approx(found.nbytes / (50e9 * 0.75), rel=0.1)


def test_parts_and_shards_together():
    model, x, labels = absent()
    with fake_ranks(16, 0):
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("fsdp", "tp"))
        model = split(model, mesh["tp"])
        local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
        asked = foregrad.plan(model, x, labels, **WHOLE, mesh=mesh)
        said = foregrad.plan(sharded(model, mesh["fsdp"]), x, labels, **WHOLE)
    assert str(asked.ranks) == "fsdp 2 by tp 8"
    assert asked.standing.parameters == said.standing.parameters == 4 * local // 2
    assert peaks(asked) == peaks(said)
    assert {one.name.split()[0] for one in said.collectives} == {"gather", "reduce", "all"}
    # Neighbours split the operators, so that the ranks which share parameters are on different hosts.
    gathered = asked.collectives[0]
    assert gathered.seconds == pytest.approx(gathered.nbytes / (50e9 * 0.75), rel=0.1)


def test_copies_of_a_model():
    model, x, labels = absent()
    expected = foregrad.plan(model, x, labels, **WHOLE, mesh={"dp": 4})
    with fake_ranks(4, 0):
        found = foregrad.plan(nn.parallel.DistributedDataParallel(model, init_sync=False), x, labels, **WHOLE)
    assert (found.ranks.dp, found.standing, peaks(found)) == (4, expected.standing, peaks(expected))


def test_a_thousand_ranks():
    model, x, labels = absent()
    with fake_ranks(1024, 0):
        mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("fsdp", "tp"))
        found = foregrad.plan(split(model, mesh["tp"]), x, labels, **WHOLE, mesh=mesh)
    assert (found.ranks.fsdp, found.ranks.tp) == (128, 8)
    assert not dist.is_initialized()


def test_overlap_hides_the_time_of_gathers_alone():
    model, x, labels = absent(8192)
    times = [
        foregrad.plan(model, x, labels, **WHOLE, mesh={"fsdp": 8, "overlap": overlap}).choice("save all").seconds
        for overlap in (True, False)
    ]
    sent = sum(one.seconds for one in foregrad.plan(model, x, labels, **WHOLE, mesh={"fsdp": 8}).collectives)
    assert times[0] < times[1] < times[0] + sent


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 8}, "splits no operator of `Net`: none of its parameters is a DTensor"),
        ({"pp": 8}, "the dimension 'pp' of a mesh is not planned"),
        ({"tp": 0}, "at least one rank"),
    ],
)
def test_ranks_that_are_not_planned(mesh, message):
    model, x, labels = absent()
    with pytest.raises(PlanError, match=message):
        foregrad.plan(model, x, labels, mesh=mesh)


def test_a_model_that_has_its_ranks_takes_no_mesh():
    model, x, labels = absent()
    with fake_ranks(8, 0):
        model = sharded(model, init_device_mesh("cpu", (8,)))
        with pytest.raises(PlanError, match="has its ranks already"):
            foregrad.plan(model, x, labels, mesh={"fsdp": 4})
        assert foregrad.plan(model, x, labels, mesh=Ranks(overlap=False)).ranks.overlap is False


def test_ranks_that_are_gone_are_named():
    model, x, labels = absent()
    with fake_ranks(8, 0):
        model = split(model, init_device_mesh("cpu", (8,)))
    with pytest.raises(PlanError, match=r"in a process group .* that is not there: plan it where its mesh was made"):
        foregrad.plan(model, x, labels)


class Trainer:
    """A model in an attribute, and the step as a method."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, x, labels):
        return self.model(x, labels)


def as_list(model):
    models = [model]
    return lambda x, labels: models[0](x, labels)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "door",
    [lambda model: lambda *args: model(*args), as_list, lambda model: Trainer(model).step],
    ids="lambda list method".split(),
)
def test_the_shards_of_a_function_are_those_of_its_model(door, reshard):
    with torch.device("meta"):
        model, x, labels = Net(), torch.empty(128, 64), torch.zeros(128, dtype=torch.long)
    settings = {"optimizer": "AdamW", "device": "h100", "mesh": {"fsdp": 4, "reshard": reshard}}
    expected = foregrad.plan(model, x, labels, **settings)
    found = foregrad.plan(door(model), x, labels, **settings)
    assert {one.name: one.peak for one in found.choices} == {one.name: one.peak for one in expected.choices}
    assert found.choice("eager").peak is not None
    assert found.collectives == expected.collectives
