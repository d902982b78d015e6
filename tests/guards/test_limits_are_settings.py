"""The limits that decide if a call runs eagerly are settings."""

from __future__ import annotations

import random
import types
from contextlib import nullcontext

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedTensorError


def by_text(x, scale):
    return x * len(str(scale))


@pytest.mark.parametrize("limit", [2, 5])
def test_the_number_of_graphs_in_a_row_that_serve_one_call_each(limit):
    with foregrad.config.override(single_use_limit=limit):
        compiled = foregrad.compile(by_text, backend="eager")
    x = torch.ones(2)
    with pytest.warns(ForegradWarning, match=f"compiled {limit} times in a row"):
        for i in range(3 * limit):
            assert torch.equal(compiled(x, i + 0.1), by_text(x, i + 0.1))
    assert len(foregrad.explain_recompiles(compiled)) == limit


def test_items_that_differ_by_turns_are_one_place():
    """A window of numbers that become text: now the first item differs from the graph's, now a later item."""
    drawn = random.Random(0)
    seen = drawn.choices([0.0, 1.0, 2.0], k=12)

    def step(x):
        seen.append(x.item())
        return x * 2, str(seen[-12:]).count("1")

    with foregrad.config.override(on_unsupported="eager"):
        compiled = foregrad.compile(step, backend="eager")
    with pytest.warns(ForegradWarning, match="compiled 8 times in a row"):
        for _ in range(20):
            _, ones = compiled(torch.tensor(drawn.choice([0.0, 1.0, 2.0])))
            assert ones == seen[-12:].count(1.0)
    assert len(seen) == 32
    assert len(foregrad.explain_recompiles(compiled)) == 8


def steps(x):
    for _ in range(int(x[0])):
        x = x + 1
    return x


@pytest.mark.parametrize(("limit", "gives_up"), [(4, True), (10_000, False)])
def test_the_number_of_graphs_that_run_in_vain(limit, gives_up):
    with foregrad.config.override(vain_limit=limit):
        compiled = foregrad.compile(steps, backend="eager")

    def calls():
        for i in range(48):
            x = torch.tensor([float(i % 6), 1.0])
            assert torch.equal(compiled(x), steps(x))

    if gives_up:
        with pytest.warns(ForegradWarning, match="in vain"):
            calls()
    else:
        calls()
    assert bool(foregrad.explain_recompiles(compiled).eager) is gives_up


def refused(x):
    if x.dim() == 1:
        torch.manual_seed(0)  # no graph can repeat it
    return x + 1


@pytest.mark.parametrize(("limit", "is_compiled"), [(0, False), (8, True)])
def test_the_number_of_kinds_of_calls_that_are_told_apart(limit, is_compiled):
    with foregrad.config.override(refusal_limit=limit, on_unsupported="eager"):
        compiled = foregrad.compile(refused, backend="eager")
    with pytest.warns(ForegradWarning, match="run eagerly"):
        compiled(torch.ones(2))
    compiled(torch.ones(2, 2))
    assert bool(len(foregrad.explain_recompiles(compiled))) is is_compiled


def two_results(x):
    return x.sin(), x.cos()


@pytest.mark.parametrize("limit", [1, 2])
def test_the_number_of_graphs_of_a_derivative_for_kinds_of_incoming_gradients(limit):
    with foregrad.config.override(path_limit=limit):
        compiled = foregrad.compile(two_results, backend="eager")

    def backward(result):
        x = torch.ones(2, requires_grad=True)
        compiled(x)[result].backward(TwoTensor(torch.ones(2), torch.ones(2)))
        assert type(x.grad) is TwoTensor

    backward(0)
    with pytest.raises(UnsupportedTensorError, match="gradient passed in") if limit == 1 else nullcontext():
        backward(1)


def test_a_call_that_was_refused_is_tried_again_where_others_have_graphs():
    """One call in a hundred replaces a module: the calls behind it are compiled again."""
    holder = types.SimpleNamespace(net=torch.nn.Linear(2, 2), count=0)

    def step(x):
        holder.count += 1
        if holder.count == 5:
            holder.net = torch.nn.Linear(2, 3)
        return holder.net(x).sum()

    with foregrad.config.override(on_unsupported="eager"):
        compiled = foregrad.compile(step, backend="eager")
    with pytest.warns(ForegradWarning, match="leaves a Linear"):
        for _ in range(40):
            x = torch.randn(2)
            assert torch.equal(compiled(x), holder.net(x).sum())
    assert foregrad.explain_recompiles(compiled).eager_calls < 20


@pytest.mark.parametrize(("repeats", "most"), [(1, 16), (2, 24)])
def test_half_the_graphs_are_enough_where_most_serve_one_call(repeats, most):
    """Batches of lists: each length makes a graph, and only lengths that come again are worth one."""
    with foregrad.config.override(on_unsupported="eager"):
        compiled = foregrad.compile(lambda rows: sum(rows), backend="eager")
    lengths = [length for length in range(1, 25) for _ in range(repeats)]
    with pytest.warns(ForegradWarning, match="most graphs served one call") if repeats == 1 else nullcontext():
        for length in lengths:
            assert torch.equal(compiled([torch.ones(2)] * length), torch.full((2,), float(length)))
    assert len(foregrad.explain_recompiles(compiled)) == most


def test_a_method_of_many_modules_gets_a_graph_for_each():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        @foregrad.compile(backend="eager", on_unsupported="raise")
        def forward(self, x):
            return self.layer(x).relu()

    net = torch.nn.Sequential(*[Block() for _ in range(20)])
    for _ in range(3):
        net(torch.randn(2, 4))
    recompiles = foregrad.explain_recompiles(Block.forward)
    assert (len(recompiles), recompiles.eager_calls) == (20, 0)
