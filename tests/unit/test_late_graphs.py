"""Halves whose graphs are made when they are read: with eager's kernels they never need be."""

import copy
import pickle

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch.graphs import ends_of, late_graph_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x):
        values, indices = torch.relu(self.first(x)).max(dim=0)
        return self.last(values * torch.tensor([2.0])).sum() * self.scale, indices


POLICIES = {"default": foregrad.default_partition, "min_cut": foregrad.min_cut_rematerialization_partition}


@pytest.fixture(params=POLICIES)
def policy(request):
    return request.param


@pytest.fixture
def halves(policy):
    module = Net()
    compiled = foregrad.compile(module, backend="eager", partition=policy)
    loss, _ = compiled(torch.randn(5, 4))
    loss.backward()
    return compiled.foregrad.specializations[0].product.compiled.partitioned


def lines(module):
    return [str(node.format_node()) for node in module.graph.nodes]


def test_a_step_with_eagers_kernels_makes_no_graph_of_a_half(halves):
    assert late_graph_of(halves.forward) is not None
    assert late_graph_of(halves.backward) is not None


def test_a_compiler_that_returns_its_graph_has_no_graph_made():
    step = foregrad.aot_function(lambda x: (x * 2).relu().sum(), foregrad.nop)
    step(torch.randn(5, 4, requires_grad=True)).backward()
    halves = step.foregrad.specializations[0].product.compiled.partitioned
    assert late_graph_of(halves.forward) is not None
    assert late_graph_of(halves.backward) is not None


def test_a_graph_that_is_read_is_the_one_of_a_partition_at_once(halves, policy):
    count = halves.joint.signature.num_forward_outputs
    at_once = POLICIES[policy](halves.joint.module, None, num_fwd_outputs=count)
    assert [late_graph_of(half) for half in at_once] == [None, None]
    for half, other in zip((halves.forward, halves.backward), at_once, strict=True):
        assert [node.name for node in ends_of(half)[0]] == [node.name for node in ends_of(other)[0]]
        assert lines(half) == lines(other)
        assert late_graph_of(half) is None
        half.graph.lint()


def test_copies_of_a_late_graph_compute_as_it_does(halves):
    tensors = [torch.randn([*node.meta["spec"].shape]) for node in ends_of(halves.forward)[0]]
    copies = [copy.deepcopy(halves.forward), copy.copy(halves.forward), pickle.loads(pickle.dumps(halves.forward))]
    for got in (each(*tensors) for each in copies):
        for value, expected in zip(got, halves.forward(*tensors), strict=True):
            assert value is expected is None or torch.equal(value, expected)


def test_compilers_get_graphs_of_their_own_and_no_half_is_made(policy):
    given = []

    def compiler(graph, example_inputs):
        given.append(graph)
        return graph

    compiled = foregrad.compile(Net(), backend=compiler, partition=policy)
    loss, _ = compiled(torch.randn(5, 4))
    loss.backward()
    parts = compiled.foregrad.specializations[0].product.compiled.partitioned
    halves = parts.forward, parts.backward
    assert None not in map(late_graph_of, halves)
    assert list(map(lines, given)) == list(map(lines, halves))
    for node in given[1].graph.nodes:  # a value that the forward computes is an input here
        assert ("autograd_backward" in node.meta) == (node.op in ("call_function", "get_attr")), node


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        kept = y.exp()
        ctx.save_for_backward(kept)
        return (x * kept.t()).sum()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].t(), None


def test_a_gradient_that_is_a_view_of_a_residual_is_no_memory_of_the_backwards_own():
    def compiler(graph, example_inputs):
        return graph

    x, y = torch.randn(3, 2, requires_grad=True), torch.randn(2, 3)
    with foregrad.config.override(check=True):  # a result in memory that is not its own is an error
        compiled = foregrad.compile(Kept.apply, backend=compiler, on_unsupported="raise")
        compiled(x, y).backward()
    assert torch.equal(x.grad, y.exp().t())
