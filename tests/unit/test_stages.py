"""Under `DistributedDataParallel` with several buckets a compiled backward gives gradients out while it runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import foregrad
from tests.parity.peak import peak_of

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("no gloo", allow_module_level=True)

from torch.nn.parallel import DistributedDataParallel

SMALL = 0.001  # of a megabyte, which one layer fills


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.inside.weight
        self.unused = nn.Linear(16, 16)

    def forward(self, x):
        return self.again(self.out(self.inside(x).tanh()).tanh())


def layers():
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())))


def normalised():
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())))


def parallel(make, *, compiled, **settings):
    torch.manual_seed(0)
    module = make()
    if compiled:
        module = foregrad.compile(module, on_unsupported="raise", **compiled)
    return DistributedDataParallel(module, bucket_cap_mb=SMALL, **settings)


def stages(model):
    (graph,) = model.module.foregrad.specializations
    return graph.product.compiled.partitioned.joint.signature.gradients.stages


def usual(model, x):
    model(x).square().sum().backward()


def accumulated(model, x):
    with model.no_sync():
        model(x).square().sum().backward()
    model(x * 2).square().sum().backward()


def twice(model, x):
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_history(model, x):
    x.requires_grad_()
    model(x * 2).square().sum().backward()
    return [x.grad]


def of_some(model, x):
    parameters = list(model.parameters())
    return torch.autograd.grad(model(x).square().sum(), [parameters[0], parameters[5]])


def derived(model, x):
    x.requires_grad_()
    (by_x,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    by_x.square().sum().backward()
    return [by_x.detach()]


WAYS = [usual, accumulated, twice, of_history, of_some, derived]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_eager(way, native):
    found = []
    for compiled in (None, {"backend": "eager"}):
        with foregrad.config.override(native=native):
            model = parallel(layers, compiled=compiled)
            for seed in range(3):
                torch.manual_seed(seed)
                given = way(model, torch.randn(4, 16)) or []
                found.append([*given, *(p.grad for p in model.parameters() if p.grad is not None)])
                model.zero_grad()
    assert len(stages(model)) > 1
    for ours, eager in zip(found[3:], found[:3], strict=True):
        assert len(ours) == len(eager)
        same = torch.allclose if way is derived else torch.equal  # which adds up two derivatives
        assert all(same(a, b) for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize("make", [Tied, normalised])
def test_tied_and_unused_parameters_and_buffers(make):
    found = []
    for compiled in (None, {"backend": "eager"}):
        model = parallel(make, compiled=compiled, find_unused_parameters=True)
        for seed in range(2):
            torch.manual_seed(seed)
            usual(model, torch.randn(4, 16))
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
        found[-1] += [buffer.tolist() for buffer in model.buffers()]
    assert len(stages(model)) > 1
    assert found[0] == found[1]


def test_gradients_arrive_between_the_stages():
    events = []

    def compiler(graph, inputs):
        return graph.forward

    def logging(graph, inputs):
        def run(*values):
            events.append("stage")
            return graph.forward(*values)

        return run

    model = parallel(layers, compiled={"backend": (compiler, logging)})
    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    usual(model, torch.randn(4, 16))
    parts = [["stage", f"{i}.weight", f"{i}.bias"] for i in (6, 4, 2, 0)]
    runs = [i for i, event in enumerate(events) if event == "stage"]
    assert [set(events[a:b]) for a, b in zip(runs, [*runs[1:], len(events)], strict=True)] == list(map(set, parts))


def test_a_stage_frees_what_it_reads_last():
    def make():
        return nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())))

    x = torch.randn(64, 64)  # as much as the gradients of a layer; a bucket has four layers
    peaks = []
    for compiled in (None, {"backend": "eager"}):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            foregrad.compile(make(), **compiled) if compiled else make(), bucket_cap_mb=0.05
        )
        for _ in range(2):
            usual(model, x)
        peaks.append(peak_of(lambda model=model: usual(model, x)))
    assert len(stages(model)) == 2
    assert peaks[1] < 1.05 * peaks[0]


def test_one_bucket_is_one_stage():
    torch.manual_seed(0)
    model = DistributedDataParallel(foregrad.compile(layers(), backend="eager"))
    usual(model, torch.randn(4, 16))
    assert stages(model) == ()
