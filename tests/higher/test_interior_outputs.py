"""Gradients by outputs that other outputs were computed from, and hooks on them: a node in C++ gives eager's."""

import itertools

import pytest
import torch
from torch.autograd import grad
from torch.nn import functional

import foregrad
from foregrad._torch.native import native
from foregrad.errors import UnsupportedError
from tests.higher.test_parts_of_backward import ProductAndSum


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


PROGRAMS = {
    "chain": lambda x, y: ((a := x.sin()), a * y),
    "longer chain": lambda x, y: ((a := x * y), (b := a.exp()), b * a),
    "nothing saved": lambda x, y: ((a := x * 2), a + y),
    "three": lambda x, y: ((a := x.tanh()), (b := a @ y), b.sin()),
    "loss and logits": lambda x, y: (
        (a := functional.linear(x, y)),
        functional.cross_entropy(a, torch.tensor([0, 1, 2])),
    ),
    "saved results": lambda x, y: ((a := x.exp()), (b := (a * y).tanh()), b * a),
    "the later one first": lambda x, y: ((a := x.sin()) * y, a),
    "apart": lambda x, y: (x.sin(), y.cos()),
    "diamond": lambda x, y: ((a := x * y), (b := a.sin()), (c := a.cos()), b * c),
    "a custom function": lambda x, y: ((a := Cube.apply(x)), Cube.apply(a) * y),
    "two results of one": lambda x, y: ((ab := ProductAndSum.apply(x, y))[0], ab[1], ab[0] * ab[1]),
    "a view used": lambda x, y: ((a := x * y), a[0].sin()),
    "a view returned": lambda x, y: ((a := x.sin())[0], a * y),
    "twice": lambda x, y: ((a := x.sin()), a, a * y),
    "written in place": lambda x, y: ((a := x * y).mul_(2), a.sin()),
    "detached": lambda x, y: ((a := x.sin()), a.detach() * y),
    "an argument returned": lambda x, y: (x, (a := x * y), a.sin() * x),
}


def seen_by(hook, tensor):
    seen = []
    tensor.register_hook(lambda g: seen.append(g.detach().clone()) or hook(g))
    return seen


def second(gradients, by):
    total = sum(g.square().sum() for g in gradients if g is not None)
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return gradients
    return [*gradients, *grad(total, by, allow_unused=True)]


def of(b, by, **kwargs):
    return [*grad((b * b.detach().cos()).sum(), by, allow_unused=True, **kwargs)]


def kept(a, b):
    a.retain_grad()
    b.sum().backward(retain_graph=True)
    (b.sum() + a.sum()).backward()
    return [a.grad]


# Given an output, a later one and the leaves.
WAYS = {
    "alone": lambda a, b, x, y: of(b, [a]),
    "again": lambda a, b, x, y: [*of(b, [a], retain_graph=True), *of(b, [a, x])],
    "with inputs": lambda a, b, x, y: of(b, [x, a, y]),
    "both asked": lambda a, b, x, y: [*grad([(b * 2).sum(), a.sum()], [a, b, x], allow_unused=True)],
    "twice": lambda a, b, x, y: second(of(b, [a], create_graph=True), [x, y]),
    "twice with inputs": lambda a, b, x, y: second(of(b, [a, x], create_graph=True), [x, y]),
    "a hook that looks": lambda a, b, x, y: [*(seen := seen_by(lambda g: None, a)), *of(b, [x, y]), *seen],
    "a hook that changes": lambda a, b, x, y: [*(seen := seen_by(lambda g: g * 2, a)), *of(b, [x, y]), *seen],
    "a hook, asked": lambda a, b, x, y: [*(seen := seen_by(lambda g: g * 2, a)), *of(b, [a, x]), *seen],
    "a hook, twice": lambda a, b, x, y: second([*seen_by(lambda g: g * 2, a), *of(b, [x], create_graph=True)], [x, y]),
    "kept": lambda a, b, x, y: [*kept(a, b), x.grad, y.grad],
    "backward to it": lambda a, b, x, y: [b.sum().backward(inputs=[a.retain_grad() or a]), a.grad],
    "a hook on the later one": lambda a, b, x, y: [*(seen := seen_by(lambda g: g * 2, b)), *of(b, [a]), *seen],
}
# The hook is to be called between two steps of the node; what the second derivative reads is not kept.
MAY_BE_REFUSED = {"a hook on the later one", "twice", "twice with inputs", "a hook, twice"}


def outcome(function, way, i, j):
    torch.manual_seed(0)
    x, y = (torch.rand(3, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    results = function(x, y)
    try:
        return WAYS[way](results[i], results[j], x, y)
    except UnsupportedError:
        return "refused"


def same(eager, ours):
    if eager is None or ours is None:
        return eager is ours
    return torch.allclose(eager, ours)


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_by_outputs(name, in_c):
    with foregrad.config.override(native=in_c):
        compiled = foregrad.compile(PROGRAMS[name], backend="eager")
        count = len(PROGRAMS[name](*torch.rand(2, 3, 3).requires_grad_()))
        refused = set()
        for (i, j), way in itertools.product(itertools.permutations(range(count), 2), WAYS):
            if name == "two results of one" and "hook" in way:
                continue  # eager calls a hook of the one with None where only the other is used
            if way == "a hook on the later one" and outcome(PROGRAMS[name], "alone", i, j) == [None]:
                continue  # eager does not go by that hook
            eager, ours = outcome(PROGRAMS[name], way, i, j), outcome(compiled, way, i, j)
            if ours == "refused":
                refused.add(way)
            else:
                assert len(eager) == len(ours) and all(map(same, eager, ours)), (i, j, way, eager, ours)
    views = {"a view returned", "written in place", "an argument returned"}
    if in_c and native() is not None and name not in views:
        assert refused <= MAY_BE_REFUSED


def test_a_part_that_ran_is_not_run_again():
    def function(x, y):
        a = x.sin()
        return a, a * y

    for run in (function, foregrad.compile(function, backend="eager")):
        x, y = torch.rand(3).requires_grad_(), torch.rand(3).requires_grad_()
        a, b = run(x, y)
        grad(b.sum(), [a, x])
        with pytest.raises(RuntimeError, match="a second time"):
            grad(b.sum(), x)


def test_watching_leaves_no_trace_in_later_backwards():
    def function(x, y):
        a = x.sin()
        return a, a * y

    found = []
    for run in (function, foregrad.compile(function, backend="eager")):
        x, y = torch.full((3,), 0.3).requires_grad_(), torch.full((3,), 0.5).requires_grad_()
        a, b = run(x, y)
        gradients = [*grad(b.sum(), a, retain_graph=True), *grad(b.sum(), (x, y), retain_graph=True)]
        gradients += [*grad(b.sum(), (a, x), retain_graph=True), *grad((b.sum(), a.sum()), (x, y), create_graph=True)]
        found.append(gradients)
    if native() is not None:
        torch.testing.assert_close(*found)
