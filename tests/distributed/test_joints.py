"""Joint graphs with descriptors of modules over a mesh, which is a fake one."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import foregrad
from foregrad import descriptors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (4,))
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


def test_local_map_stays_one_operator_where_it_is_asked_to(mesh):
    """Forward and backward are one node each, of global shapes, with what a tool shards them by."""
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
    from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable
    from torch._higher_order_ops import local_map as operator
    from torch.distributed.tensor.experimental import local_map
    from torch.export._trace import _restore_state_dict

    placed = (Shard(0),)

    @local_map(out_placements=(placed,), in_placements=(placed,), redistribute_inputs=True, device_mesh=mesh)
    def inside(x):
        return x.sin() * 2

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return inside(self.linear(x))

    mode = torch._subclasses.FakeTensorMode()
    with mode:
        module, x = Mapped(), torch.randn(16, 8)
    with LocalMapWrappedHigherOrderVariable.enable(), operator.defer_inlining(), contextlib.ExitStack() as stack:
        graph = _dynamo_graph_capture_for_export(module)(x)
        _restore_state_dict(module, graph)
        jd = foregrad.aot_export_joint_with_descriptors(stack, graph, (x,))
        nodes = [node for node in jd.graph_module.graph.nodes if "call_local_map" in str(node.target)]
        assert len(nodes) == 2
        assert all(node.meta["local_map_kwargs"]["device_mesh"] == mesh for node in nodes)
        assert [node.meta["partitioner_tag"] for node in nodes] == ["is_forward", "is_backward"]
        assert nodes[0].meta["val"][0].shape == (16, 8)
