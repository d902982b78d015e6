"""A compiler is given from the cache what it would be given without."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.backends.eager import eager_compiler
from foregrad.store.cache.keeper import data_of, flags_of
from tests.store.cache.kept import PREPARED, fresh_cache, prepare
from tests.store.cache.warm import Net


def noted(x, w):
    """Nodes that autograd numbers, in another order than that of the graph."""
    first, second = (x @ w).sin(), (x * 2).cos()
    return (second.sum() * first).sum(0), x.detach().clone()


def attended(x, w):
    q = (x @ w).view(x.shape[0], 2, 2).transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, q.sin(), q, is_causal=True).sum()


def prepared(module):
    """With numbers of autograd that no node of the joint graph has."""
    copy = prepare(module)
    for node in copy.graph.nodes:
        if node.name not in {other.name for other in module.graph.nodes} and "seq_nr" in node.meta:
            node.meta["seq_nr"] += 1000
    return copy


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [noted, attended, Net])
def test_graphs_are_the_same(program, dynamic):
    given = []

    def recording_compiler(gm, example_inputs):
        given.append(data_of(gm, flags_of))
        return eager_compiler(gm, example_inputs)

    foregrad.register_backend(
        "recording", recording_compiler, cache_key=lambda: 1, prepare_joint=prepared, partition="min_cut", replace=True
    )

    def graphs():
        given.clear()
        PREPARED.clear()
        torch.manual_seed(0)
        arguments = (torch.randn(3, 6, requires_grad=True),)
        if program is not Net:
            arguments = (torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
        f = foregrad.compile(Net() if program is Net else program, backend="recording", dynamic=dynamic)
        out = f(*arguments)
        (out if program is not noted else out[0]).sum().backward()
        return list(given)

    with fresh_cache():
        made = graphs()
        assert PREPARED
        assert graphs() == made
        assert PREPARED == []
    assert len(made) == 2
    assert any("seq_nr" in node for node in made[1]["nodes"])


def test_numbers_that_a_graph_reads_off_tensors_come_back():
    """A graph may have symbols of floats and no symbols of sizes: the counts of steps of an optimizer."""

    def train():
        torch.manual_seed(0)
        weight = torch.randn(3, requires_grad=True)
        optimizer = torch.optim.AdamW([weight])

        @foregrad.compile(backend="kept")
        def step(x):
            (weight.sin() * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4):
            step(torch.randn(3))
        return weight.detach()

    with fresh_cache():
        PREPARED.clear()
        expected, made = train(), len(PREPARED)
        assert made
        assert torch.equal(train(), expected)
        assert len(PREPARED) == made
