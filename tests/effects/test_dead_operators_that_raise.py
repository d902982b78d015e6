"""Operators that raise for some values are run though nothing needs their results, as eager runs them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import foregrad

DOORS = {
    "directly": lambda f: foregrad.compile(f, backend="eager"),
    "under torch.compile": lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}),
    "with Inductor": lambda f: foregrad.compile(f, backend="inductor"),
}


def written(x, i):
    x.clone()[i] = 1.0


def overwritten(x, i):
    y = x.clone()
    y[i] = 1.0
    y.zero_()
    return y


DEAD = {
    "a write": written,
    "overwritten": overwritten,
    "index": lambda x, i: x[i],
    "index_put": lambda x, i: x.clone().index_put_((i,), torch.ones(1)),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.clone().index_add_(0, i, torch.ones(1)),
    "index_copy": lambda x, i: x.clone().index_copy_(0, i, torch.ones(1)),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "gather": lambda x, i: x.gather(0, i),
    "scatter": lambda x, i: x.scatter(0, i, 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i, torch.ones(1)),
    "take": lambda x, i: x.take(i),
    "put": lambda x, i: x.clone().put_(i, torch.ones(1)),
    "embedding": lambda x, i: functional.embedding(i, x[:, None]),
    "nll_loss": lambda x, i: functional.nll_loss(x[None], i),
    "cross_entropy": lambda x, i: functional.cross_entropy(x[None], i),
    "binary_cross_entropy": lambda x, i: functional.binary_cross_entropy(x * i, x / 2),
    "integers": lambda x, i: i // (i - 7),
    "remainders": lambda x, i: i % (i - 7),
}
DYNAMO_DROPS = {"index"}  # from its own graph


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", DEAD)
def test_what_raises_raises_and_what_does_not_does_not(name, door):
    if door == "under torch.compile" and name in DYNAMO_DROPS:
        return
    if door == "with Inductor" and name not in ("a write", "gather", "embedding"):
        return

    def f(x, i):
        DEAD[name](x, i)
        return x * 2

    torch._dynamo.reset()
    g = DOORS[door](f)
    good, bad = torch.tensor([1]), torch.tensor([7])
    for x in (torch.rand(3), torch.rand(3, requires_grad=True)):
        assert torch.equal(g(x, good), x * 2)
        with pytest.raises(Exception) as wanted:
            f(x, bad)
        with pytest.raises(wanted.type):
            g(x, bad)
        assert torch.equal(g(x, good), x * 2)


def test_nothing_of_the_call_is_seen():
    def f(x, i):
        x.add_(1)
        x.clone()[i] = 1.0
        return x * 2

    g = foregrad.compile(f, backend="eager")
    sides = []
    for h in (f, g, g):
        x = torch.zeros(3)
        with pytest.raises(IndexError):
            h(x, torch.tensor([7]))
        sides.append(x)
    assert torch.equal(sides[0], sides[1])
    assert torch.equal(sides[0], sides[2])


def test_what_is_needed_is_no_check():
    def f(x, i):
        return x[i].sum(), functional.embedding(i, x[:, None])

    joint = foregrad.capture(f, torch.rand(3), torch.tensor([1]))
    assert not joint.signature.stops.checks
