"""`torch.cond`, `switch`, `torch.while_loop` and nested regions: directly, and in the graphs of Dynamo."""

import pytest
import torch
import torch._higher_order_ops
from torch._higher_order_ops.while_loop import while_loop

import foregrad

switch = getattr(torch._higher_order_ops, "switch", None)  # since PyTorch 2.14


def pick(p, x, y):
    return torch.cond(p, lambda x, y: x.sin() * y, lambda x, y: y.cos() + 1, (x, y))


def pick_of_a_value(p, x, y):
    z = x * 2
    return torch.cond((z + p).sum() > 0, lambda z, y: z.exp() + y, lambda z, y: z - y, (z, y)) * 3


def two_results(p, x, y):
    return torch.cond(p, lambda x, y: (x.sin() * 2, y + 0), lambda x, y: (torch.ones(3), x * y), (x, y))


def nothing_used(p, x, y):
    return torch.cond(p, lambda x, y: torch.ones(3), lambda x, y: x * y, (x, y)) * 2


def nested(p, x, y):
    def inner(x, y):
        return torch.cond(x.sum() > 0, lambda x, y: x * y, lambda x, y: x / (y + 5), (x, y))

    return torch.cond(p, inner, lambda x, y: x - y, (x, y))


def loop(p, x, y):
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, x, y: i < p + 2, lambda i, x, y: (i + 1, x.sin() * y, y.clone()), (start, x, y))[1]


def pick_of_three(p, x, y):
    branches = (lambda x, y: x.sin() * y, lambda x, y: y.cos() + 1, lambda x, y: torch.ones(3))
    return switch(p * 3 + (x.sum() > 0), branches, (x, y)) * 2  # 3 and 4 are taken for 2


def pick_of_trees(p, x, y):
    branches = [lambda ts: {"a": ts[0] * y}, lambda ts: {"a": ts[1] + 1}]
    return switch(p.to(torch.int64), branches, ([x * 2, y],))["a"]


# Dynamo, which eager's `torch.cond` calls, reads `.grad` of operands that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

FUNCTIONS = [pick, pick_of_a_value, two_results, nothing_used, nested, loop]
if switch is not None:
    FUNCTIONS += [pick_of_three, pick_of_trees]


def outcome(function, p, x, y):
    x, y = (t.detach().clone().requires_grad_(t.requires_grad) for t in (x, y))
    out = function(p, x, y)
    outs = out if isinstance(out, tuple) else (out,)
    required = [o.requires_grad for o in outs]
    if any(required):
        sum(o.square().sum() for o in outs).backward()
    return [*outs, x.grad, y.grad], required


def check(compiled, function, values):
    for p in values:
        for grads in ((True, True), (True, False), (False, False)):
            torch.manual_seed(0)
            x, y = (torch.randn(3).requires_grad_(grad) for grad in grads)
            ours, required = outcome(compiled, p, x, y)
            eager, wanted = outcome(function, p, x, y)
            assert required == wanted
            for one, two in zip(ours, eager, strict=True):
                assert (one is None) == (two is None)
                assert one is None or torch.equal(one, two)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_way_through_is_eagers(function):
    compiled = foregrad.compile(function, backend="eager")
    check(compiled, function, [torch.tensor(True), torch.tensor(False), torch.tensor(True)])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_way_through_is_eagers_under_torch_compile(function):
    compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"}, fullgraph=True)
    check(compiled, function, [torch.tensor(True), torch.tensor(False), torch.tensor(True)])


def test_each_way_has_one_graph_that_is_used_again():
    compiled = foregrad.compile(pick, backend="eager")
    x, y = torch.randn(3), torch.randn(3)
    for value in (True, False, True, False):
        compiled(torch.tensor(value), x, y)
    assert len(compiled.foregrad.specializations) == 2


def one_of_two(flag, true, false, operands):
    return switch(1 - flag.to(torch.int64), (true, false), operands)


@pytest.mark.parametrize("choose", [torch.cond] + [one_of_two] * (switch is not None), ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [True, False])
def test_what_only_the_other_branch_closes_over_gets_zeros(value, choose):
    def function(flag, x, w, b):
        y = x * 3
        return choose(flag, lambda x: (x * w, x.sum()), lambda x: (x + b * y, x.mean()), (x,))

    def gradients(call):
        torch.manual_seed(0)
        leaves = [torch.randn(3, requires_grad=True) for _ in range(3)]
        return torch.autograd.grad(sum(t.sum() for t in call(torch.tensor(value), *leaves)), leaves, allow_unused=True)

    torch._dynamo.reset()
    wanted, found = gradients(function), gradients(foregrad.compile(function, backend="eager"))
    assert [g is None for g in found] == [g is None for g in wanted] == [False] * 3
    for one, two in zip(wanted, found, strict=True):
        assert torch.equal(one, two)
    assert not found[2 if value else 1].any()


def test_a_plain_bool_is_a_constant():
    compiled = foregrad.compile(lambda x: torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,)), backend="eager")
    for size in (2, 3):
        x = torch.randn(size)
        assert torch.equal(compiled(x), x.sin() if size > 2 else x.cos())


def test_second_derivatives_go_through_the_branch_taken():
    compiled = foregrad.compile(pick, backend="eager")
    for value in (True, False):
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        (first,) = torch.autograd.grad(compiled(torch.tensor(value), x, y).sum(), y, create_graph=True)
        seconds = torch.autograd.grad(first.sum(), (x, y), allow_unused=True, materialize_grads=True)
        wanted = (x.cos(), torch.zeros(3)) if value else (torch.zeros(3), -y.cos())
        for one, two in zip(seconds, wanted, strict=True):
            torch.testing.assert_close(one, two)


def test_a_region_compiled_once_is_inlined():
    @torch.compiler.nested_compile_region
    def layer(x, w):
        return (x @ w).relu()

    def function(x, w):
        return layer(layer(x, w), w).sum()

    compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"}, fullgraph=True)
    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    grads = []
    for call in (compiled, lambda x, w: ((x @ w).relu() @ w).relu().sum()):
        leaf = w.clone().requires_grad_()
        call(x, leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_torchs_own_are_back_afterwards():
    before = torch.compiler.is_dynamo_compiling, type(torch.ops.higher_order.cond).__call__
    foregrad.compile(pick, backend="eager")(torch.tensor(True), torch.ones(3), torch.ones(3))
    assert (torch.compiler.is_dynamo_compiling, type(torch.ops.higher_order.cond).__call__) == before
