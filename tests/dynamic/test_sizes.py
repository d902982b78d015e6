"""Sizes that depend on values: a graph for each size, found by running the program's beginning on the arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import foregrad
from tests.parity.oracle import check


def floats():
    return torch.randn(4, 3).requires_grad_()


def mask():
    return torch.rand(4, 3) > 0.5


def few():
    return torch.randint(0, 4, (6,))


PROGRAMS = {
    "nonzero": (lambda x, m: (x * m).nonzero(), floats, mask),
    "nonzero as tuple": (lambda x, m: x[m.nonzero(as_tuple=True)] * 2, floats, mask),
    "argwhere": (lambda x, m: torch.argwhere(m).sum(0) + x.sum(), floats, mask),
    "where with one argument": (lambda x, m: x[torch.where(m)].exp(), floats, mask),
    "mask index": (lambda x, m: x[m].sin().sum(), floats, mask),
    "mask index of rows": (lambda x, m: x[m.any(1)].sin(), floats, mask),
    "mask index by bytes": (lambda x, m: x.flatten()[m.flatten().nonzero().flatten()], floats, mask),
    "masked select": (lambda x, m: x.masked_select(m) * 2, floats, mask),
    "assigned through a mask": (lambda x, m: (x * 1).masked_fill(m, 0.0)[m].sum() + x.sum(), floats, mask),
    "put through a mask": (lambda x, m: (x * 1).index_put((m,), x[m] * 2), floats, mask),
    "put a number through a mask": (lambda x, m: x.index_put((m,), x.sum()), floats, mask),
    "scattered through a mask": (lambda x, m: torch.zeros(4, 3).masked_scatter(m, x[m]), floats, mask),
    "unique": (lambda n, x: n.unique().float().sum() * x, few, floats),
    "unique with counts": (lambda n, x: n.unique(return_inverse=True, return_counts=True), few, floats),
    "unique consecutive": (lambda n, x: torch.unique_consecutive(n), few, floats),
    "unique rows": (lambda n, x: torch.unique(n.view(3, 2), dim=0), few, floats),
    "bincount": (lambda n, x: n.bincount(), few, floats),
    "bincount with weights": (lambda n, x: n.bincount(x.detach().flatten()[:6]), few, floats),
    "one hot": (lambda n, x: F.one_hot(n).float() @ torch.ones(int(n.max()) + 1), few, floats),
    "one hot of a known number": (lambda n, x: F.one_hot(n, 5).float() @ x.new_ones(5), few, floats),
    "repeat interleave": (lambda n, x: x.repeat_interleave(n[:4], dim=0), few, floats),
    "repeat interleave alone": (lambda n, x: torch.repeat_interleave(n), few, floats),
    "tensor split": (lambda n, x: torch.tensor_split(x, n[:2].sort().values), few, floats),
    "a made size": (lambda n, x: torch.zeros(int(n[0]), 2) + x.sum(), few, floats),
    "a range": (lambda n, x: torch.arange(int(n.sum())) * x.sum(), few, floats),
    "a slice": (lambda n, x: x[: n[0]], few, floats),
    "narrow": (lambda n, x: x.narrow(0, n[0] * 0, 2), few, floats),
    "chunks by list": (lambda n, x: torch.split(x.flatten(), [int(n[0]), 12 - int(n[0])]), few, floats),
    "length of what is not used": (lambda n, x: x * len(n.nonzero()), few, floats),
    "padded": (lambda n, x: torch.nn.utils.rnn.pad_sequence([x[: int(k) + 1] for k in n[:3]]), few, floats),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes_that_depend_on_values(name):
    fn, *makers = PROGRAMS[name]
    assert check(fn, lambda: tuple(make() for make in makers), calls=5) == "equal"


def test_a_graph_serves_every_call_with_its_sizes():
    fn = foregrad.compile(lambda x, m: x[m].sum(), backend="eager")
    for k in (1, 2, 1, 2, 1):
        x, chosen = torch.rand(3).requires_grad_(), torch.arange(3) < k
        assert torch.equal(fn(x, chosen), x[chosen].sum())
        assert torch.equal(fn(x, chosen.flip(0)), x[chosen.flip(0)].sum())
    assert len(fn.foregrad.specializations) == 2


def test_nothing_is_written_when_a_size_differs():
    def fn(x, m, count):
        count.add_(1)
        picked = x[m]
        count.mul_(picked.shape[0])
        return picked * 2

    makers = [lambda k=k: (torch.rand(4).requires_grad_(), torch.arange(4) < k, torch.ones(2)) for k in (1, 3, 0, 3, 1)]
    assert check(fn, makers, calls=5) == "equal"


@torch.library.custom_op("foregrad_tests::first_few", mutates_args=())
def first_few(x: torch.Tensor) -> torch.Tensor:
    return x[: int(x.sum()) % 3 + 1].clone()


def test_an_operator_that_has_no_fake_is_run_for_real():
    assert check(lambda x, n: x.sum() * first_few(n).sum(), lambda: (floats(), few()), calls=5) == "equal"


@pytest.mark.parametrize("lengths", ["tensors", "lists"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss(reduction, lengths):
    def make():
        counted = torch.tensor([10, 8]), torch.tensor([3, 2])
        counts = counted if lengths == "tensors" else tuple(tuple(c.tolist()) for c in counted)
        return torch.randn(10, 2, 5).requires_grad_(), torch.randint(1, 5, (2, 3)), *counts

    def fn(x, targets, inputs, given):
        return F.ctc_loss(x.log_softmax(2), targets, inputs, given, reduction=reduction, zero_infinity=True)

    assert check(fn, make, calls=3) == "equal"


def test_min_cut_saves_what_was_sized():
    fn, *makers = PROGRAMS["put through a mask"]

    def compile(f):
        return foregrad.compile(f, backend="eager", partition="min_cut")

    assert check(fn, lambda: tuple(make() for make in makers), calls=3, compile=compile) == "equal"
