"""Tensor parallel and data parallel modules: DTensors are wrapper subclasses, their collectives operators in the graph."""

import pytest
import torch
import torch.distributed as dist

import foregrad
from tests.classes.wrappers import described

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("no gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def compiled(f):
    return foregrad.compile(f, backend="eager", on_unsupported="raise")


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def in_parallel(mesh):
    return parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def trained(model, call, rank=0):
    found = []
    for step in range(2):
        torch.manual_seed(step * 10 + rank)
        result = call(torch.randn(3, 4))
        result.square().sum().backward()
        found.append(result.tolist())
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = parameter.grad
                found.append((gradient.to_local() if isinstance(gradient, DTensor) else gradient).tolist())
                parameter -= 0.1 * gradient
                parameter.grad = None
    return found


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor(mesh):
    def f(a):
        return (a @ a).relu()

    def run(call):
        torch.manual_seed(0)
        a = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]).requires_grad_()
        result = call(a)
        result.sum().to_local().backward()
        return described(result.to_local()), described(a.grad.to_local()), a.grad.placements

    assert run(compiled(f)) == run(f)


def test_tensor_parallel_on_one_rank(mesh):
    model = in_parallel(mesh)
    expected = trained(model, model)
    model = in_parallel(mesh)
    assert trained(model, compiled(model)) == expected


def on_two_ranks(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = in_parallel(mesh)
    expected = trained(model, model)
    model = in_parallel(mesh)
    assert trained(model, compiled(model)) == expected
    text = str(foregrad.capture(model, torch.randn(3, 4)))
    assert text.count("_c10d_functional.all_reduce") == text.count("_c10d_functional.wait_tensor") > 0

    model = DistributedDataParallel(network())
    expected = trained(model, model, rank)
    model = DistributedDataParallel(compiled(network()))
    assert trained(model, model, rank) == expected
    model = DistributedDataParallel(network())
    assert trained(model, compiled(model), rank) == expected
    dist.destroy_process_group()


@pytest.mark.slow
def test_tensor_and_data_parallel_on_two_ranks(tmp_path):
    torch.multiprocessing.spawn(on_two_ranks, (str(tmp_path / "store"),), 2)
