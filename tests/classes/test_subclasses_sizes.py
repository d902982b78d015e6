"""Wrapper subclasses of sizes that vary from call to call: one graph serves them, and gives what eager does."""

import pytest
import torch
import torch.nn.functional as F

import foregrad

from .wrappers import Packed, Unit, described, nested, quantised, two

X = lambda n: torch.randn(n, 3, requires_grad=True)

PROGRAMS = {
    "matmul": (lambda a, b: (a @ b).relu(), lambda n: two(n, 3, grad=True), lambda n: torch.randn(3, 4)),
    "nested": (lambda a, b: (a @ b).relu(), lambda n: nested(n, 3, grad=True), lambda n: torch.randn(3, 4)),
    "flat": (lambda a: (a * a).view(-1), lambda n: two(n, 3, grad=True)),
    "views": (lambda a: (a.t().sin(), (a * 2)[1:], a.expand(2, *a.shape) * 2), lambda n: two(n, 3)),
    "views_by_sizes": (
        lambda a: ((a * 2).view(a.shape[0] * 3), (a * 3)[: a.shape[0] - 1], (-a).narrow(0, 1, a.shape[0] - 2)),
        lambda n: two(n, 3, grad=True),
    ),
    "laid_out_otherwise": (lambda a: a * 2, lambda n: two(3, n).t()),
    "size_returned": (lambda a: (a.t().sin(), a.shape[0]), lambda n: two(n, n, grad=True)),
    "units": (lambda a, b: a * b, lambda n: Unit(torch.randn(n), 1).requires_grad_(), lambda n: Unit(torch.ones(n), 2)),
    "quantised_weight": (F.linear, X, lambda n: quantised(4, 3)),
    "gradient_that_is_plain": (
        lambda w, x: F.linear(x, w).relu(),
        lambda n: quantised(n, 3, grad=True),
        lambda n: X(2),
    ),
    "written": (lambda a: a.mul_(2)[1:] + 1, lambda n: two(n, 3)),
    "mean": (lambda a: a.mean() * a.shape[0], lambda n: two(n, 3, grad=True)),
}


def found(f, call, makers, n):
    torch.manual_seed(n)
    args = [make(n) for make in makers]
    result = call(*args)
    results = result if isinstance(result, tuple) else (result,)
    losses = [r.float().sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if losses:
        loss = sum(losses[1:], losses[0])
        loss.backward(torch.ones_like(loss.detach()) if type(loss) is not torch.Tensor else None)
    return described(result), [described(a.grad) for a in args if a.is_leaf], described(args)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_all_sizes(name, dynamic):
    f, *makers = PROGRAMS[name]
    fast = foregrad.compile(f, backend="eager", on_unsupported="raise", dynamic=dynamic)
    for n in (5, 6, 7, 9, 4):
        assert found(f, fast, makers, n) == found(f, f, makers, n)
    # The quantised weight's rows are read off two tensors in it, one of which is found to vary later.
    assert len(fast.foregrad.specializations) <= (1 if dynamic else 3 if name == "gradient_that_is_plain" else 2)


def test_sizes_that_no_tensor_inside_has_get_graphs_of_their_own():
    fast = foregrad.compile(lambda a: a * 2, backend="eager", on_unsupported="raise")
    for n in (2, 3, 4, 3, 2):
        a = Packed.of(torch.randn(n, 3))
        assert described(fast(a)) == described(a * 2)
    assert len(fast.foregrad.specializations) <= 3


def test_a_size_that_is_another_ones_by_chance_is_looked_at_in_each_call():
    fast = foregrad.compile(lambda a: a * 2, backend="eager", on_unsupported="raise", dynamic=True)
    for sizes in ((4, 4), (4, 6), (6, 4), (5, 5)):
        a = two(*sizes)
        assert described(fast(a)) == described(a * 2)


def test_a_parameter_keeps_its_sizes():
    weight = torch.nn.Parameter(two(3, 4))
    fast = foregrad.compile(lambda w, x: x @ w, backend="eager", on_unsupported="raise", dynamic=True)
    for n in (2, 5, 6):
        x = torch.randn(n, 3)
        assert described(fast(weight, x)) == described(x @ weight)
    (graph,) = fast.foregrad.specializations
    inputs = graph.product.captured.joint.signature.inputs
    assert [tuple(map(str, i.spec.shape)) for i in inputs[:2]] == [("3", "4")] * 2


def test_a_gradient_comes_in_with_the_sizes_of_its_result():
    fast = foregrad.compile(lambda a: a * a, backend="eager", on_unsupported="raise", dynamic=True)
    for n in (4, 5):
        a = two(n, 3, grad=True)
        expected = two(n, 3)
        fast(a).backward(expected)
        assert described(a.grad) == described(a.detach() * expected * 2)
