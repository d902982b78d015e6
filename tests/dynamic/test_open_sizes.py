"""Sizes that depend on values and change from call to call: one graph for all of two and more."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import foregrad
from tests.covering import each
from tests.parity.oracle import check

COUNTS = [2, 3, 4, 5, 9, 3, 2]


def chosen(k, n=12):
    return torch.randn(n).requires_grad_(), torch.arange(n) < k


def grid(k):
    return torch.randn(4, 5, 3).requires_grad_(), torch.arange(20).view(4, 5) < k


def numbered(k):
    return torch.randn(4, 3).requires_grad_(), torch.arange(8) % k


def with_another(k):
    return (*chosen(k), torch.randn(k).requires_grad_())


def assigned(x, m):
    y = x * 1
    y[m] = x[m].exp() * 3
    return y


def updated(x, m, count):
    count.add_(x.detach()[m].sum())
    return x[m] * count


def outputs_that_share(x, m):
    y = x[m]
    return y.view(1, -1), y.view(-1, 1), y[1:]


PROGRAMS = {
    "mask": (lambda x, m: x[m].sin() * 2, chosen),
    "mask of a grid": (lambda x, m: x[m].exp().sum(1), grid),
    "mask in the middle": (lambda x, m: x.permute(2, 0, 1)[:, m].sum(0), grid),
    "mask after a transpose": (lambda x, m: x.permute(2, 0, 1)[:, m] * 2, grid),
    "masked select": (lambda x, m: x.masked_select(m).exp() * 3, chosen),
    "nonzero": (lambda x, m: x[m.nonzero().flatten()].exp(), chosen),
    "nonzero as tuple": (lambda x, m: x[m.nonzero(as_tuple=True)] * 2, grid),
    "a size in arithmetic": (lambda x, m: x[m] / x[m].shape[0] + m.nonzero().shape[0], chosen),
    "a size returned": (lambda x, m: (x * 2, m.nonzero().shape[0]), chosen),
    "two masks": (lambda x, m: x[m].sum() * x[~m].exp().sum(), chosen),
    "two masks that agree": (lambda x, m: x[m] + x.flip(0)[m.flip(0)], chosen),
    "the size of an argument": (lambda x, m, y: (y * 2, y.view(y.shape[0], 1), x[m] * y), with_another),
    "assigned through a mask": (assigned, chosen),
    "scattered through a mask": (lambda x, m: torch.zeros(12).masked_scatter(m, x[m].tanh()), chosen),
    "an input updated": (updated, lambda k: (*chosen(k), torch.ones(1))),
    "views of what was picked": (lambda x, m: x[m].view(-1, 1).expand(-1, 3).t(), chosen),
    "outputs that share memory": (outputs_that_share, chosen),
    "random numbers": (lambda x, m: F.dropout(x[m], 0.5), chosen),
    "softmax and product": (lambda x, m: (x[m].view(-1, 1) @ x[m].view(1, -1)).softmax(1), chosen),
    "repeat interleave": (lambda x, n: x.repeat_interleave(n[:4], 0).exp(), numbered),
    "unique": (lambda x, n: n.unique().float().sum() * x, numbered),
    "unique with counts": (lambda x, n: n.unique(return_inverse=True, return_counts=True), numbered),
    "unique consecutive": (lambda x, n: torch.unique_consecutive(n.sort().values, return_counts=True), numbered),
    "unique rows": (lambda x, n: torch.unique(n.view(8, 1), dim=0, return_inverse=True), numbered),
    "bincount": (lambda x, n: n.bincount(), numbered),
}


def compiled_once(found, **options):
    """A way to compile for the oracle that remembers what it made."""

    def compile(fn):
        found.append(foregrad.compile(fn, backend="eager", **options))
        return found[-1]

    return compile


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_graphs_serve_every_size(name):
    fn, make = PROGRAMS[name]
    found = []
    makers = [lambda k=k: make(k) for k in (COUNTS if make is not numbered else [2, 3, 4, 6, 3])]
    assert check(fn, makers, calls=len(makers), compile=compiled_once(found)) == "equal"
    assert [len(f.foregrad.compilations) for f in found] == [2] * len(found)


@pytest.mark.parametrize("name", ["mask", "assigned through a mask", "softmax and product", "a size in arithmetic"])
@pytest.mark.parametrize("options", [{"partition": "min_cut"}, {"dynamic": True}], ids=["min cut", "dynamic"])
def test_through_the_other_ways_of_compiling(name, options):
    fn, make = PROGRAMS[name]
    found = []
    makers = [lambda k=k: make(k) for k in COUNTS]
    assert check(fn, makers, calls=len(makers), compile=compiled_once(found, **options)) == "equal"
    assert [len(f.foregrad.compilations) for f in found] == [1 if "dynamic" in options else 2] * len(found)


def test_none_when_told_so():
    f = foregrad.compile(lambda x, m: x[m] * 2, backend="eager", dynamic=False)
    for k in (2, 3, 4):
        f(*chosen(k))
    assert len(f.foregrad.specializations) == 3


def test_together_with_sizes_of_arguments():
    f = foregrad.compile(lambda x, m: (x[m].view(-1, 1) * x).softmax(1) / x.shape[0], backend="eager")
    for k in (2, 3, 5, 4, 7):
        x, m = chosen(k, k + 6)
        assert torch.equal(f(x, m), (x[m].view(-1, 1) * x).softmax(1) / x.shape[0])
    assert len(f.foregrad.specializations) == 2


def test_zero_and_one_get_graphs_of_their_own():
    f = foregrad.compile(lambda x, m: x[m].sum() * 2, backend="eager")
    for k in (2, 3, 1, 0, 5, 1, 0, 4):
        x, m = chosen(k)
        assert torch.equal(f(x, m), x[m].sum() * 2)
    assert len(f.foregrad.specializations) == 4


def test_a_branch_on_such_a_size_is_looked_at_when_the_graph_has_run():
    def fn(x, m, count):
        count.add_(1)
        return x[m] * 2 if m.nonzero().shape[0] > 4 else x[m] * 3

    makers = [lambda k=k: (*chosen(k), torch.zeros(1)) for k in (2, 3, 5, 4, 6, 5, 3, 8)]
    found = []
    assert check(fn, makers, calls=len(makers), compile=compiled_once(found)) == "equal"
    assert [len(f.foregrad.compilations) for f in found] == [3] * len(found)


def test_sizes_that_agree_by_chance_are_looked_at():
    def fn(x, m, y):
        picked = x[m]
        return picked * y if picked.shape == y.shape else picked.sum() + y.sum()

    f = foregrad.compile(fn, backend="eager")
    for k in (2, 3, 5, 4, 6, 5, 3):
        x, m = chosen(k)
        y = torch.randn(5)
        assert torch.equal(f(x, m, y), fn(x, m, y))
    assert len(f.foregrad.specializations) == 3


def test_a_loop_over_such_a_size_is_a_graph_for_each():
    def fn(x, m):
        return sum(x[m] * i for i in range(x[m].shape[0]))

    f = foregrad.compile(fn, backend="eager")
    for k in (2, 3, 5, 2, 3):
        x, m = chosen(k)
        assert torch.equal(f(x, m), fn(x, m))
    assert len(f.foregrad.specializations) == 3


@pytest.mark.parametrize(
    ("name", "options"),
    each(
        ["mask", "assigned through a mask", "nonzero", "two masks that agree", "masked select"],
        [{}, {"partition": "min_cut"}],
    ),
)
def test_derivatives_of_any_order(name, options):
    fn, make = PROGRAMS[name]
    f = foregrad.compile(fn, backend="eager", **options)
    for k in (2, 3, 4, 1, 5):
        found = []
        for function in (fn, f):
            torch.manual_seed(k)
            x, m = make(k)
            grads = [function(x, m)]
            for _ in range(3):
                grads += torch.autograd.grad(grads[-1].pow(3).sum(), x, create_graph=True)
            found.append(grads)
        for ours, eagers in zip(*reversed(found), strict=True):
            torch.testing.assert_close(ours, eagers)
    assert len(f.foregrad.specializations) == 3


def test_an_operator_that_nobody_knows_gets_a_graph_for_each_size():
    f = foregrad.compile(lambda x, n: x.sum() * torch.ops.foregrad_tests.some_of(n).sum(), backend="eager")
    for k in (2, 3, 4):
        x, n = numbered(k)
        assert torch.equal(f(x, n), x.sum() * torch.ops.foregrad_tests.some_of(n).sum())
    assert len(f.foregrad.specializations) == 3


@torch.library.custom_op("foregrad_tests::some_of", mutates_args=())
def some_of(x: torch.Tensor) -> torch.Tensor:
    return x[: int(x.max()) + 1].clone()


def test_the_print_says_that_the_size_is_found():
    f = foregrad.compile(lambda x, m: x[m] * 2, backend="eager")
    for k in (2, 3):
        f(*chosen(k))
    open_size = f.foregrad.specializations[1]
    assert "size found at" in str(open_size.product.captured.joint)
    assert "if not (2 <= out_1):" in open_size.source()
