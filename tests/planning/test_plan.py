"""What `foregrad.plan` foresees is what runs: peaks, optimizers' states, choices; and what it refuses, by name."""

from __future__ import annotations

import gc
import json
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import foregrad
from foregrad import planning
from foregrad.errors import BudgetError, PlanError, UnsupportedDataDependentError
from foregrad.planning.page import page as page_of
from tests.covering import each
from tests.parity.peak import peak_of
from tests.planning.networks import Net


def real(batch: int = 256):
    torch.manual_seed(0)
    return Net(), torch.randn(batch, 64), torch.randint(0, 10, (batch,))


def absent(batch: int = 256, dtype=torch.float32):
    with torch.device("meta"):
        return Net().to(dtype), torch.empty(batch, 64, dtype=dtype), torch.zeros(batch, dtype=torch.long)


def faked():
    with FakeTensorMode():
        return real()


# ------------------------------------------------------------------------------------------------- against eager's own


# Of the smaller batch the optimizer's step is the peak, of the larger one the backward.
@pytest.mark.parametrize(
    ("optimizer", "batch", "policy"),
    each(["SGD", "AdamW", "Adagrad", "RMSprop"], [2, 256], ["default", "min_cut"], times=2),
)
def test_the_peak_of_a_whole_step_is_the_allocators(policy, optimizer, batch):
    model, x, labels = real(batch)
    found = foregrad.plan(model, x, labels, optimizer=optimizer, device="cpu", policies={"it": policy})
    memory = found.choice("it").memory
    compiled = foregrad.compile(model, backend="eager", partition=policy)
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)

    def step():
        compiled(x, labels).backward()
        steps.step()
        steps.zero_grad()

    step()
    step()
    gc.collect()
    assert memory.peak - found.standing.total == pytest.approx(peak_of(step), rel=0.02)


@pytest.mark.parametrize("make", [absent, faked, real])
def test_what_stands_is_counted(make):
    model, x, labels = make()
    found = foregrad.plan(model, x, labels, optimizer=torch.optim.Adam, device="cpu")
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert found.standing == planning.planner.Standing(parameters, 0, 256 * 64 * 4 + 256 * 8, 2 * parameters)
    assert found.trained * 4 == parameters


OPTIMIZERS = {
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = {"LBFGS": "runs the model itself", "SparseAdam": "can't step on tensors without values"}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_the_state_of_each_optimizer_of_pytorch(kind):
    with torch.device("meta"):
        model, x = nn.Linear(32, 48, bias=False), torch.empty(4, 32)
    call = {"optimizer": kind, "device": "cpu"}
    if kind.__name__ in REFUSED:
        with pytest.raises(PlanError, match=REFUSED[kind.__name__]):
            foregrad.plan(lambda x: model(x).sum(), x, **call)
        return
    found = foregrad.plan(lambda x: model(x).sum(), x, **call).optimizer
    there = nn.Linear(32, 48, bias=False)
    optimizer = kind(there.parameters())
    there.weight.grad = torch.randn_like(there.weight)
    optimizer.step()
    state = optimizer.state[there.weight]
    expected = sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1)
    assert found.state == pytest.approx(expected, abs=16)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_an_optimizer_says_of_sparse_gradients_what_it_says_in_a_step(kind, layer):
    if kind.__name__ in REFUSED:
        pytest.skip("not planned")
    table, at = layer(64, 8, sparse=True), torch.zeros(4, 2, dtype=torch.long)
    optimizer = kind(table.parameters())
    table(at).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as refused:
        with pytest.raises(PlanError, match=str(refused)):
            foregrad.plan(lambda at: table(at).sum(), at, optimizer=optimizer, device="h100")
        return
    assert foregrad.plan(lambda at: table(at).sum(), at, optimizer=kind, device="h100").optimizer.name == kind.__name__


def test_an_optimizer_that_was_made_keeps_its_groups():
    model, x, labels = absent()
    groups = [
        {"params": list(model.layers.parameters()), "momentum": 0.9},
        {"params": list(model.head.parameters()), "momentum": 0.0},
    ]
    found = foregrad.plan(model, x, labels, optimizer=torch.optim.SGD(groups, lr=0.1))
    assert found.optimizer.state == sum(p.numel() * 4 for p in model.layers.parameters())


def test_on_accelerators_an_optimizer_works_on_lists():
    model, x, labels = absent()
    on = {name: foregrad.plan(model, x, labels, optimizer="Adam", device=name).optimizer for name in ("cpu", "h100")}
    largest = max(p.numel() for p in model.parameters()) * 4
    assert on["cpu"].workspace <= 3 * largest
    assert on["h100"].workspace >= sum(p.numel() for p in model.parameters()) * 4


# ------------------------------------------------------------------------------------------------- choices


def test_choices_beside_one_another():
    model, x, labels = absent(4096)
    found = foregrad.plan(model, x, labels, optimizer="SGD", device="l4", budget="30 MiB")
    peaks = {one.name: one.peak for one in found.choices}
    cuts = ["save all", "min cut", "budget", "checkpoint each layer", "full checkpointing", "offload"]
    assert list(peaks) == [*cuts, "eager"]
    assert peaks["budget"] <= 30 << 20 < peaks["save all"]
    layers, everything = found.choice("checkpoint each layer"), found.choice("save all")
    assert layers.peak < everything.peak
    assert layers.memory.saved < everything.memory.saved / 2
    assert layers.again_flops > 0 == everything.again_flops
    assert layers.seconds > everything.seconds
    assert found.choice("offload").away > 0
    assert found.best.name == min(found.fitting, key=lambda one: one.seconds).name


def test_a_checkpointed_layer_saves_what_enters_it():
    model, x, labels = absent(4096)
    memory = foregrad.plan(model, x, labels, device="l4").choice("checkpoint each layer").memory
    # What enters the second layer and each after it, and the head; the first one's is an argument. Small ones beside.
    assert memory.saved == pytest.approx(4 * 4096 * 64 * 4, rel=0.1)


def test_operations_are_those_of_the_products():
    model, x, labels = absent(256)
    found = foregrad.plan(model, x, labels, device="h100")
    products = 4 * 2 * (64 * 256) + 64 * 10
    first = 2 * 256 * 64 * 256  # the first layer's input has a gradient too, through its norm
    assert found.total.flops == 3 * 2 * 256 * products
    assert first < found.total.flops
    assert sum(tally.flops for tally in found.modules.values()) == found.total.flops
    assert {"layers.*.up", "layers.*.down", "layers.*.norm", "head"} <= set(found.modules)


def test_products_in_groups_are_counted():
    """As experts compute them: rows of 64 numbers, split among eight matrices."""
    with torch.device("meta"):
        rows = torch.empty(512, 64, dtype=torch.bfloat16, requires_grad=True)
        experts = torch.empty(8, 64, 32, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.zeros(8, dtype=torch.int32)

    def loss(rows, experts):
        return torch._grouped_mm(rows, experts, offs=ends).square().sum()

    plan = foregrad.plan(loss, rows, experts)
    assert plan.total.flops == 3 * 2 * 512 * 64 * 32
    with pytest.raises(PlanError, match=r"the backward of `<lambda>` fails: .*stride"):
        foregrad.plan(lambda rows, experts: torch._grouped_mm(rows, experts, offs=ends).sum(), rows, experts)


def test_a_budget_below_what_stands_says_so():
    model = nn.Linear(1024, 1024, device="meta")
    plan = foregrad.plan(
        model, torch.empty(8, 1024, device="meta"), optimizer="AdamW", device={"like": "l4", "memory": "8 MiB"}
    )
    assert "12.0 MiB stand through the whole step, the budget is 8.0 MiB" in str(plan)


def test_a_gpus_attention_keeps_no_scores():
    q = torch.empty(2, 4, 512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def attend(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()

    scores = 2 * 4 * 512 * 512 * 2
    assert foregrad.plan(attend, q, device="h100").choice("save all").memory.saved < scores
    assert foregrad.plan(attend, q, device="cpu").choice("save all").memory.saved >= scores


def test_a_policy_of_ones_own():
    model, x, labels = absent()
    found = foregrad.plan(model, x, labels, policies={"mine": foregrad.nothing_saveable})
    assert found.choice("mine").memory.saved < found.choice("save all").memory.saved


def test_the_loss_is_found():
    model, x, labels = absent()
    expected = foregrad.plan(model, x, labels, device="cpu").choice("save all").peak
    for wrap in (lambda loss: {"loss": loss, "more": x}, lambda loss: (x, loss), lambda loss: [loss]):
        found = foregrad.plan(lambda x, labels, wrap=wrap: wrap(model(x, labels)), x, labels, device="cpu")
        assert found.choice("save all").peak == expected


# ------------------------------------------------------------------------------------------------- ranks


def test_shards_are_a_part_of_everything_that_stands():
    model, x, labels = absent()
    one = foregrad.plan(model, x, labels, optimizer="Adam", device="h100")
    eight = foregrad.plan(model, x, labels, optimizer="Adam", device="h100", mesh={"fsdp": 2})
    assert eight.standing.parameters == one.standing.parameters // 2
    assert eight.standing.optimizer == one.standing.optimizer // 2
    assert eight.standing.arguments == one.standing.arguments


def test_copies_add_their_buckets():
    model, x, labels = absent()
    one = foregrad.plan(model, x, labels, optimizer="SGD", device="h100").choice("save all")
    two = foregrad.plan(model, x, labels, optimizer="SGD", device="h100", mesh={"dp": 2}).choice("save all")
    assert two.peak - one.peak == one.memory.gradients


def test_collectives_of_shards():
    model, x, labels = absent(dtype=torch.bfloat16)
    mesh = {"fsdp": 8, "reduce_dtype": "float32"}
    gathered, reduced = foregrad.plan(model, x, labels, device="h100", mesh=mesh).collectives
    count = sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for p in model.layers.parameters())
    assert gathered.count == 1 + 2 * len(model.layers)
    assert gathered.nbytes == (count + layers) * 2 * 7 // 8
    assert reduced.nbytes == count * 4 * 7 // 8
    assert gathered.seconds == pytest.approx(gathered.nbytes / (450e9 * 0.75), rel=1e-3)


def test_shards_that_stay_gathered_need_more():
    model, x, labels = absent(8)
    peaks = [
        foregrad.plan(model, x, labels, device="h100", mesh={"fsdp": 64, "reshard": again}).choice("save all").peak
        for again in (True, False)
    ]
    assert peaks[0] < peaks[1]


# ------------------------------------------------------------------------------------------------- the largest


@pytest.mark.parametrize("choice", ["save all", "checkpoint each layer", "budget", None])
def test_the_largest_batch_is_the_largest_by_trying(choice):
    model, x, labels = absent(8)
    found = foregrad.plan(model, x, labels, optimizer="Adam", device="l4").largest(under="4 MiB", choice=choice)

    def peak(batch):
        device = {"like": "l4", "memory": "4 MiB"}
        other = foregrad.plan(model, *absent(batch)[1:], optimizer="Adam", device=device)
        named = [one for one in other.choices if one.name == choice or (choice is None and one.name != "budget")]
        return min(math.inf if one.peak is None else one.peak for one in named)

    assert peak(found.size) == found.peak <= 4 << 20 < peak(found.size + 1)
    assert len(found.tried) <= (15 if choice == "budget" else 9)  # of thousands
    assert (found.captures, found.why_captured) == (2, "")  # with a symbol, and of a batch of one


def test_a_batch_of_real_arguments_on_the_cpu():
    model, x, labels = real(8)
    found = foregrad.plan(model, x, labels, optimizer="SGD", device="cpu").largest(under="3 MiB", choice="min cut")

    def peak(batch):
        return foregrad.plan(model, *real(batch)[1:], optimizer="SGD", device="cpu").choice("min cut").peak

    assert peak(found.size) == found.peak <= 3 << 20 < peak(found.size + 1)


def test_a_model_that_takes_no_symbol_is_captured_at_each_size():
    with torch.device("meta"):
        layer, x = nn.Linear(64, 64), torch.empty(4, 64)

    def loss(x):
        return sum(layer(x)[i].sum() for i in range(x.shape[0]))

    found = foregrad.plan(loss, x, device="l4").largest(under="64 KiB", choice="save all")
    assert "dimension 0 of args[0] was marked as dynamic, but `step` only works for size 4" in found.why_captured
    assert found.captures > 2
    sizes = (found.size, found.size + 1)
    peaks = [foregrad.plan(loss, torch.empty(n, 64, device="meta"), device="l4").choice("save all").peak for n in sizes]
    assert peaks[0] == found.peak <= 64 << 10 < peaks[1]


def test_one_tensor_that_is_passed_twice_is_counted_once():
    with torch.device("meta"):
        layer, x = nn.Linear(64, 64), torch.empty(4, 64)
    plan = foregrad.plan(lambda x, y: (layer(x) * y).sum(), x, x, device="l4")
    found = plan.largest(under="64 KiB", choice="save all")
    other = torch.empty(found.size, 64, device="meta")
    assert foregrad.plan(plan.call[0].function, other, other, device="l4").choice("save all").peak == found.peak


def test_a_table_of_batch_by_sequence():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)), torch.empty(2, 8, 32)
        where = torch.empty(8, 1)

    def loss(x, where):
        return model(x + where).sum()

    plan = foregrad.plan(loss, x, where, device="l4")
    text = str(plan.table(batch=({0: 0}, [1, 2, 4]), sequence=({0: 1, 1: 0}, [8, 16])))
    assert len(text.splitlines()) == 5
    assert text.splitlines()[1].split() == ["batch", "8", "16"]
    with torch.device("meta"):
        largest = foregrad.plan(loss, torch.empty(4, 16, 32), torch.empty(16, 1), device="l4")
    least = min(one.peak for one in largest.choices if one.name != "budget")
    assert foregrad.partitioners.in_bytes(least) in text.splitlines()[-1]


def test_not_even_one_fits():
    model, x, labels = absent()
    plan = foregrad.plan(model, x, labels, optimizer="Adam", device="l4")
    for choice, said in (
        (None, "the least peak is"),
        ("budget", "stand through the whole step, the budget is 1.0 MiB"),
    ):
        with pytest.raises(BudgetError, match=f"not even a batch of one fits.*{said}"):
            plan.largest(under="1 MiB", choice=choice)
    cells = str(plan.table(batch=(0, [1, 1 << 25]), sequence=({0: 1}, [64]), choice="budget")).splitlines()[2:]
    assert [row.split()[-1] for row in cells] == ["MiB", "!"]


def test_a_choice_that_is_there_at_no_size_says_why():
    with torch.device("meta"):
        table, at = nn.EmbeddingBag(64, 8, sparse=True), torch.zeros(4, 2, dtype=torch.long)
    plan = foregrad.plan(lambda at: table(at).sum(), at, device="l4")
    with pytest.raises(PlanError, match=r"there is no 'eager' at a size of .*sparse gradient"):
        plan.largest(choice="eager")


def test_a_dimension_that_is_not_there():
    model, x, labels = absent()
    with pytest.raises(PlanError, match="no argument has the dimension 5"):
        foregrad.plan(model, x, labels, device="l4").largest(batch=5)


# ------------------------------------------------------------------------------------------------- how it is shown


def test_a_plan_as_text_json_and_page(tmp_path):
    model, x, labels = absent()
    found = foregrad.plan(model, x, labels, optimizer="AdamW", device="h100", mesh={"fsdp": 8})
    text = str(found)
    for said in (
        "plan of Net",
        "state of AdamW",
        "checkpoint each layer",
        "gather parameters",
        "70% of the operations",
    ):
        assert said in text
    data = json.loads(found.to_json())
    assert data["best"] == found.best.name
    assert [one["name"] for one in data["choices"]] == [one.name for one in found.choices]
    page = found.save(tmp_path / "plan.html").read_text()
    assert page.count("<svg") == sum(one.memory is not None for one in found.choices)
    assert "<script" not in page
    assert "<pre>plan of Net" in found._repr_html_()
    assert "no optimizer" in str(foregrad.plan(model, x, labels, device="h100"))


def test_without_a_budget_nothing_is_said_to_fit():
    model, x, labels = absent()
    found = foregrad.plan(model, x, labels, optimizer="SGD", device="cpu")
    assert found.budget is None
    assert "fits" not in str(found)
    assert 'class="yes">' not in page_of(found)
    assert 'class="yes">' in page_of(foregrad.plan(model, x, labels, optimizer="SGD", device="l4"))


def test_the_host_is_no_place_for_values_of_the_cpu():
    model, x, labels = absent()
    names = {name: [one.name for one in foregrad.plan(model, x, labels, device=name).choices] for name in ("cpu", "l4")}
    assert "offload" in names["l4"]
    assert "offload" not in names["cpu"]


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "h1000"}, "there is no device 'h1000' in the table: it has a100, .*b200"),
        ({"device": {"memory": 1}}, "needs bandwidth, flops"),
        ({"device": {"speed": 1}}, "a device has no speed"),
        ({"device": "h100", "shares": {"flop": 1}}, "shares are flops, bandwidth and link"),
        ({"device": {"like": "h100", "flops": {}}}, "flops of a device are numbers by dtype"),
        ({"device": {"like": "h100", "flops": {"bf16": 1e14}}}, "by dtype, as bfloat16 or float32, not by 'bf16'"),
        ({"device": {"like": "h100", "bandwidth": 0}}, "bandwidth of a device is a number above 0, not 0"),
        ({"device": {"like": "h100", "memory": -1}}, "memory of a device is in bytes, or .* not -1"),
        ({"device": {"like": "h100", "memory": 1.5}}, "memory of a device is in bytes, or text with a unit"),
        ({"device": "h100", "shares": {"link": 0}}, "a share is above 0.0 and at most 1.0; link is 0"),
        ({"device": "h100", "shares": 0.5}, "shares are a dict"),
        ({"device": "cpu", "budget": 0.5}, "that of `cpu` is not known"),
        ({"optimizer": torch.optim.Adam(nn.Linear(2, 2).parameters())}, "none of the parameters of this Adam gets a"),
        ({"policies": {"save all": "min_cut"}}, "'save all' is a choice of each plan"),
        ({"policies": ["min_cut"]}, "policies are partitions by name"),
        ({"optimizer": "Adman"}, "torch.optim has no Adman"),
        ({"optimizer": lambda parameters: 3}, "gives an int; it is no optimizer"),
        ({"optimizer": 3}, "an optimizer is a class"),
        ({"mesh": {"pp": 8}}, "the dimension 'pp' of a mesh is not planned"),
        ({"mesh": {"fsdp": 0}}, "at least one rank"),
        ({"mesh": {"fsdp": -2}}, "at least one rank in each dimension, not fsdp -2"),
        ({"mesh": {"fsdp": 2.5}}, "ranks of a mesh are counted in integers, not fsdp 2.5"),
        ({"mesh": "all"}, "a mesh is a dict"),
    ],
)
def test_settings_that_mean_nothing(settings, message):
    model, x, labels = absent()
    with pytest.raises(PlanError, match=message):
        foregrad.plan(model, x, labels, **settings)


@pytest.mark.parametrize(
    ("budget", "message"),
    [(-1, "is negative"), (-0.5, "no fraction"), ("80", "write a number with a unit"), ("-3 GiB", "no memory budget")],
)
def test_budgets_that_mean_nothing(budget, message):
    model, x, labels = absent()
    with pytest.raises(ValueError, match=message):
        foregrad.plan(model, x, labels, budget=budget)
    with pytest.raises(ValueError, match=message):
        foregrad.plan(model, x, labels).largest(under=budget)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda plan: plan.largest(batch="x"), "a dict, not 'x'"),
        (lambda plan: plan.largest(batch=()), r"a dict, not \(\)"),
        (lambda plan: plan.largest(batch={"y": 0}), "no argument has the dimension"),
        (lambda plan: plan.table(batch=0, sequence=1), "batch and sequence of a table are pairs"),
        (lambda plan: plan.table(batch=(0, [0]), sequence=(1, [64])), "integers from 1 on, not 0"),
        (lambda plan: plan.in_flight(0), "at least one micro-batch"),
        (lambda plan: plan.in_flight(1.5), "at least one micro-batch is in flight, not 1.5"),
    ],
)
def test_sizes_that_mean_nothing(ask, message):
    model, x, labels = absent()
    plan = foregrad.plan(model, x, labels, device="l4")
    with pytest.raises(PlanError, match=message):
        ask(plan)


def test_a_step_that_runs_its_own_backward_is_planned_up_to_its_loss():
    model, x, labels = absent()

    def step(x, labels):
        loss = model(x, labels)
        loss.backward()
        return loss

    with pytest.raises(PlanError, match="Leave `backward` and the optimizer out of `step`"):
        foregrad.plan(step, x, labels)


def test_a_plan_is_of_a_training_where_gradients_are_off_too():
    model, x, labels = absent()
    expected = foregrad.plan(model, x, labels, device="cpu").choice("save all").peak
    with torch.no_grad():
        assert foregrad.plan(model, x, labels, device="cpu").choice("save all").peak == expected


def test_a_budget_below_the_least_says_the_least_and_what_holds_it():
    model, x, labels = absent()
    with pytest.raises(BudgetError, match=r"the least is .*bytes\), by '.*holds: parameters .*state of Adam ") as found:
        foregrad.plan(model, x, labels, optimizer="Adam", device="h100", budget="1 MiB")
    assert "state of Adam" in str(found.value)


def test_a_model_without_a_loss():
    model, x, labels = absent()
    with pytest.raises(PlanError, match="none is called `loss`"):
        foregrad.plan(lambda x: (model.head(x), model.head(x) * 2), x)
    with pytest.raises(PlanError, match="has no backward"):
        foregrad.plan(lambda x: x.sum(), x)
    del labels


def test_a_model_that_needs_a_value():
    model, x, labels = absent()
    with pytest.raises(UnsupportedDataDependentError, match="has no values"):
        foregrad.plan(lambda x, labels: model(x[labels > 0], labels[labels > 0]), x, labels)


def test_a_device_of_ones_own():
    model, x, labels = absent()
    mine = {"name": "mine", "memory": "48 GiB", "bandwidth": 0.9e12, "flops": {"float32": 40e12}}
    found = foregrad.plan(model, x, labels, device=mine)
    assert (found.device.memory, found.budget) == (48 << 30, 48 << 30)
    other = foregrad.plan(model, x, labels, device={"like": "h100", "memory": 94 << 30})
    assert other.device.bandwidth == planning.DEVICES["h100"].bandwidth


def test_a_budget_of_a_rank_is_kept_to_and_used():
    model, x, labels = absent(4096)
    every = foregrad.plan(model, x, labels, device="h100", mesh={"fsdp": 8})
    most, least = every.choice("save all").peak, every.choice("checkpoint each layer").peak
    budget = (most + least) // 2
    found = foregrad.plan(model, x, labels, device="h100", mesh={"fsdp": 8}, budget=budget).choice("budget")
    assert least < found.peak <= budget
    assert found.memory.saved > every.choice("checkpoint each layer").memory.saved
    assert found.again_flops > 0 or found.memory.saved < every.choice("save all").memory.saved


def test_gradients_of_a_rank_are_whole_for_one_layer_alone():
    model, x, labels = absent(1)
    memory = foregrad.plan(model, x, labels, device="h100", mesh={"fsdp": 64}).choice("save all").memory
    layer = sum(p.numel() * 4 for p in model.layers[0].parameters())
    # Gathered: the layer, the next one, and the buffer of its own; its gradients, and two buffers of reductions.
    assert memory.peak < 7 * layer + sum(p.numel() * 4 for p in model.head.parameters()) * 3
    assert memory.gradients < layer


def test_marked_arguments_are_planned_by_their_sizes():
    model, x, labels = absent(64)
    expected = foregrad.plan(model, x, labels, optimizer="Adam", device="l4")
    for tensor in (x, labels):
        foregrad.mark_dynamic(tensor, 0)
    found = foregrad.plan(model, x, labels, optimizer="Adam", device="l4")
    assert [(one.name, one.peak) for one in found.choices] == [(one.name, one.peak) for one in expected.choices]


@pytest.mark.parametrize("mesh", [None, {"fsdp": 4}], ids=["alone", "fsdp"])
def test_a_model_is_its_blocks_and_what_ties_them(mesh):
    def peaks(layers):
        with torch.device("meta"):
            model, x, labels = Net(layers), torch.empty(1024, 64), torch.zeros(1024, dtype=torch.long)
        plan = foregrad.plan(model, x, labels, optimizer="AdamW", device="h100", mesh=mesh)
        return {one.name: one.peak for one in plan.choices}

    few, more, whole = peaks(3), peaks(4), peaks(9)
    assert whole == {name: few[name] + 6 * (more[name] - few[name]) for name in whole}
