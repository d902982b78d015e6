"""Joint graphs with descriptors of modules over a mesh, which is a fake one."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable
from torch._higher_order_ops import local_map as operator
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import local_map
from torch.export._trace import _restore_state_dict
from torch.fx.traceback import annotate, preserve_node_meta
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad import descriptors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def mesh(request):
    size = getattr(request, "param", 4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


class Sharded(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(torch.randn(8), mesh, [Replicate()]))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias).relu()


def test_parameters_that_are_dtensors_are_their_local_tensors(mesh):
    """Results and gradients are eager's, as DTensors; the functions of descriptors find the parts."""
    module, x = Sharded(mesh), distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    with contextlib.ExitStack() as stack:
        jd = foregrad.aot_export_joint_with_descriptors(stack, module, (x,))
        run = foregrad.aot_compile_joint_with_descriptors(jd)
    graph = jd.graph_module.graph
    named = descriptors.get_named_param_nodes(graph)
    assert [*named][:2] == ["weight._local_tensor", "bias._local_tensor"]
    assert named["weight._local_tensor"].meta["val"].shape == (2, 8)
    pairs = descriptors.get_param_and_grad_nodes(graph)
    assert next(grad for desc, (_, grad) in pairs.items() if desc.base.target == "weight") is not None
    out, expected = run(module.weight, module.bias, x), module(x)
    assert out.placements == expected.placements
    found = torch.autograd.grad(out.sum(), [module.weight, module.bias])
    grads = torch.autograd.grad(expected.sum(), [module.weight, module.bias])
    for one, other in ((out, expected), *zip(found, grads, strict=True)):
        assert one.placements == other.placements
        assert torch.equal(one.to_local(), other.to_local())
    with contextlib.ExitStack() as stack, pytest.raises(foregrad.errors.UnsupportedError, match="tensor subclasses"):
        jd = foregrad.aot_export_joint_with_descriptors(stack, module, (x,))
        foregrad.aot_compile_joint_with_descriptors(jd, serializable=True)


def double(x):
    return x.sin() * 2


def three_results(x):
    return x.sin().t(), x.exp(), (x > 0).float()


def one_buffer(x):
    y = x.cos()
    return y.exp() * y.sum(), None


def half_used(x, y):
    return x.exp() + y.detach()


def checkpointed(x):
    return checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False)


class Mapped(nn.Module):
    def __init__(self, mesh, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        arguments = function.__code__.co_argcount
        results = {three_results: [ROWS] * 3, one_buffer: [ROWS, None]}.get(function, [ROWS])
        self.function = local_map(function, tuple(results), (ROWS,) * arguments, device_mesh=mesh)
        self.arguments = arguments

    def forward(self, x):
        return self.function(*[self.linear(x + i) for i in range(self.arguments)])


ROWS = (Shard(0),)
FUNCTIONS = [double, three_results, one_buffer, half_used, checkpointed]


@contextlib.contextmanager
def captured(module, x):
    """The joint graph of a module where `local_map` stays one operator."""
    with LocalMapWrappedHigherOrderVariable.enable(), operator.defer_inlining(), contextlib.ExitStack() as stack:
        graph = _dynamo_graph_capture_for_export(module)(x)
        _restore_state_dict(module, graph)
        yield foregrad.aot_export_joint_with_descriptors(stack, graph, (x,))


def operators(jd):
    return [node for node in jd.graph_module.graph.nodes if "call_local_map" in str(node.target)]


def test_local_map_stays_one_operator_where_it_is_asked_to(mesh):
    """Forward and backward are one node each, of global shapes, with what a tool shards them by."""
    with torch._subclasses.FakeTensorMode():
        module, x = Mapped(mesh, double), torch.randn(16, 8)
    with captured(module, x) as jd:
        nodes = operators(jd)
    assert len(nodes) == 2
    assert all(node.meta["local_map_kwargs"]["device_mesh"] == mesh for node in nodes)
    assert [node.meta["partitioner_tag"] for node in nodes] == ["is_forward", "is_backward"]
    assert nodes[0].meta["val"][0].shape == (16, 8)


@pytest.mark.parametrize("mesh", [1], indirect=True)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_local_map_as_one_operator_gives_the_results_and_gradients_of_eager(mesh, function):
    """On one device, where the local part of a tensor is the tensor. A result without gradients has none here."""
    module, x = Mapped(mesh, function), torch.randn(4, 8)
    plain = [p.detach().clone().requires_grad_() for p in module.parameters()]
    with captured(module, x) as jd:
        assert len(operators(jd)) == 2
        run = foregrad.aot_compile_joint_with_descriptors(jd)
    found = run(*plain, x)
    found = found if isinstance(found, (tuple, list)) else (found,)
    expected = function(*[nn.functional.linear(x + i, *plain) for i in range(module.arguments)])
    expected = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (torch.equal(one, other) and one.requires_grad == other.requires_grad)
    grads = [
        torch.autograd.grad(sum(r.square().sum() for r in results if r is not None), plain)
        for results in (found, expected)
    ]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_local_map_without_gradients_is_one_operator_of_the_forward(mesh):
    module, x = Mapped(mesh, double).requires_grad_(False), torch.randn(4, 8)
    with captured(module, x) as jd:
        assert len(operators(jd)) == 1
        run = foregrad.aot_compile_joint_with_descriptors(jd)
    assert torch.equal(run(*module.parameters(), x), double(module.linear(x)))


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_local_map_with_placements_of_gradients_is_refused_by_name(mesh):
    module, x = Mapped(mesh, double), torch.randn(4, 8)
    module.function = local_map(double, (ROWS,), (ROWS,), in_grad_placements=(ROWS,), device_mesh=mesh)
    with pytest.raises(foregrad.errors.UnsupportedOpError, match="in_grad_placements"), captured(module, x):
        pass


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_what_a_program_notes_of_its_nodes_is_in_the_graphs_of_local_map(mesh):
    def noted(x):
        with annotate({"inside": 2}):
            return x.sin() * 2

    module, x = Mapped(mesh, noted), torch.randn(4, 8)
    with preserve_node_meta(), captured(module, x) as jd:
        graphs = [node.target.__closure__[0].cell_contents.graph for node in operators(jd)]
    assert len(graphs) == 2
    for graph in graphs:
        called = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        assert called
        assert all(node.meta["custom"] == {"inside": 2} for node in called)


def scaled(x):
    return x.mean() * x.sin()


def size_alone(x):
    return x.mean() + torch.zeros(x.shape[0], 8)


@pytest.mark.parametrize("function", [scaled, size_alone], ids=lambda f: f.__name__)
def test_the_derivative_of_local_map_may_need_a_symbolic_size(mesh, function):
    """The sizes of the local parts are quotients of the symbols. The halves are right for parts of any size."""
    module, x = Mapped(mesh, function), torch.randn(16, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with LocalMapWrappedHigherOrderVariable.enable(), operator.defer_inlining(), contextlib.ExitStack() as stack:
        graph = _dynamo_graph_capture_for_export(module)(x)
        _restore_state_dict(module, graph)
        fake = graph.meta["fake_mode"].from_tensor(x)
        jd = foregrad.aot_export_joint_with_descriptors(stack, graph, (fake,))
        nodes = operators(jd)
        forward, backward = [node.target.__closure__[0].cell_contents for node in nodes]
    assert all(isinstance(value, torch.Tensor) for node in nodes for value in node.meta["val"])
    for rows in (4, 7):
        part, tangent = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 8)
        found, *saved = forward(part.detach())
        expected = function(part)
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0)
        (gradient,) = torch.autograd.grad(expected, part, tangent)
        torch.testing.assert_close(backward(*saved, tangent)[0], gradient)
