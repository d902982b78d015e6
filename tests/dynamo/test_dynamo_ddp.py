"""DistributedDataParallel's buckets split a graph of Dynamo's; each part comes to the backend on fake tensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from foregrad.backends.eager import eager_compiler
from foregrad.graph.role import role_of

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_each_bucket_is_a_graph_and_gradients_are_eagers(tmp_path):
    phases = []

    def seen(gm, inputs):
        phases.append(role_of(gm).phase)
        return eager_compiler(gm, inputs)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        net = Net()
        theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1.5)
        ours = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1.5)
        call = torch.compile(ours, backend="foregrad", options={"backend": seen})
        for _ in range(3):
            x = torch.randn(8, 512)
            expected, actual = theirs(x).pow(2).mean(), call(x).pow(2).mean()
            expected.backward()
            actual.backward()
            assert torch.equal(actual, expected)
            for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
                p.grad = q.grad = None
    finally:
        dist.destroy_process_group()
    assert phases.count("forward") >= 2, "the buckets split nothing: the test tests nothing"
    assert phases.count("backward") == phases.count("forward")
