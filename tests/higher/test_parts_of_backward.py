"""Backwards through parts of a function, one after the other: eager's nodes run once each, unless the graph is kept."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import foregrad

SIDE = 3


class ProductAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        return a * y + b, a * x + b


def written(x, y):
    z, w = x * 1, y.sin()
    z.mul_(y)
    w.add_(1)
    return z, w


def loss_and_logits(x, y):
    logits = torch.nn.functional.linear(x, y)
    return logits, torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2]))


def inner_gradient(x, y):
    return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0], y.sin()


PROGRAMS = {
    "apart": lambda x, y: (x.sin(), y.cos()),
    "one input": lambda x, y: (x.sin(), x.cos()),
    "a node that saves, before both": lambda x, y: ((h := (x * y).sin()) * 2, h.cos()),
    "one that saves nothing": lambda x, y: ((h := x + y).sin(), h.cos()),
    "one after the other": lambda x, y: ((h := x.sin()), h * y),
    "three": lambda x, y: (x.sin(), y.exp(), x * y),
    "results saved": lambda x, y: (x.exp(), y.sigmoid()),
    "numbers saved": lambda x, y: (x * 2 + y, y * 3),
    "one output": lambda x, y: x.sin() + y.cos(),
    "views": lambda x, y: (x[0].sin(), (y.t() @ x)[1]),
    "arguments returned": lambda x, y: (x, x.sin(), y),
    "a custom function": lambda x, y: ProductAndSum.apply(x, y),
    "written in place": written,
    "dropout": lambda x, y: (torch.dropout(x, 0.5, True), torch.dropout(y, 0.5, True) * x),
    "indices": lambda x, y: (x[torch.tensor([0, 1])], y[torch.tensor([0, 2])].sin()),
    "loss and logits": loss_and_logits,
    "checkpointed": lambda x, y: (checkpoint(torch.sin, x * y, use_reentrant=False), y.sin()),
    "an inner gradient": inner_gradient,
}


def run(function, steps):
    """For each step (the outputs, the inputs or None for all leaves, whether the graph is kept) what comes of it."""
    torch.manual_seed(1)
    leaves = [torch.rand(SIDE, SIDE).requires_grad_() for _ in range(2)]
    torch.manual_seed(0)
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    found = []
    for number, (which, inputs, keep) in enumerate(steps, 1):
        roots = [(outputs[i] * number).sum() for i in which]
        try:
            if inputs is None:
                torch.autograd.backward(roots, retain_graph=keep)
                found.append([None if leaf.grad is None else leaf.grad.clone() for leaf in leaves])
            else:
                wanted = [leaves[i] for i in inputs]
                found.append([*torch.autograd.grad(roots, wanted, retain_graph=keep, allow_unused=True)])
        except RuntimeError as error:
            assert "a second time" in str(error)
            found.append("ran twice")
            break  # what a failed backward let go of depends on where the engine stood
    return found


def same(eager, ours):
    if isinstance(eager, list) and isinstance(ours, list):
        return len(eager) == len(ours) and all(map(same, eager, ours))
    if isinstance(eager, torch.Tensor) and isinstance(ours, torch.Tensor):
        return torch.equal(eager, ours)
    return type(eager) is type(ours) and eager == ours


def sequences(count):
    outputs = [*((i,) for i in range(count)), *([(0, 1)] if count > 1 else [])]
    steps = [*itertools.product(outputs, [None, (0,), (1,)], [False])]
    yield from itertools.product(steps, steps)
    yield from (((which, None, True), step, step) for (which, _, _), step in itertools.product(steps, steps[::3]))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_backwards_one_after_the_other(name, native):
    function = PROGRAMS[name]
    count = len(outputs) if isinstance(outputs := function(*torch.ones(2, 3, 3).requires_grad_()), tuple) else 1
    with foregrad.config.override(native=native):
        compiled = foregrad.compile(function, backend="eager")
        for steps in sequences(count):
            eager, ours = run(function, steps), run(compiled, steps)
            assert same(eager, ours), (steps, eager, ours)


@pytest.mark.parametrize("native", [True, False])
def test_derivatives_of_one_part_after_another(native):
    def function(x, y):
        return x.sin(), y.cos()

    found = []
    with foregrad.config.override(native=native):
        for run in (function, foregrad.compile(function, backend="eager")):
            x, y = torch.full((2,), 0.5).requires_grad_(), torch.full((2,), 0.3).requires_grad_()
            a, b = run(x, y)
            first = torch.autograd.grad(a.sum(), x, create_graph=True, retain_graph=False)[0]
            second = torch.autograd.grad(b.sum(), y, create_graph=True, retain_graph=False)[0]
            found.append(torch.autograd.grad((first * second).sum(), (x, y)))
            with pytest.raises(RuntimeError, match="a second time"):
                torch.autograd.grad(a.sum(), x, create_graph=True)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("native", [True, False])
def test_derivatives_where_nothing_is_saved(native):
    def function(x, y):
        return x * 2 + y, y * 3

    with foregrad.config.override(native=native):
        for run in (function, foregrad.compile(function, backend="eager")):
            x, y = torch.ones(2).requires_grad_(), torch.ones(2).requires_grad_()
            a, _ = run(x, y)
            torch.autograd.grad(a.sum(), (x, y), create_graph=True, retain_graph=False)
            assert torch.equal(torch.autograd.grad(a.sum(), y, create_graph=True)[0], torch.ones(2))
            with pytest.raises(RuntimeError, match="a second time"):
                torch.autograd.grad(a.sum(), x, create_graph=True)


@pytest.mark.parametrize("native", [True, False])
def test_what_a_part_saved_goes_when_it_has_run(native):
    """And what the other part saved stays, with its hooks and its check for writes."""
    with foregrad.config.override(native=native):
        compiled = foregrad.compile(lambda x, y: ((x * 1).sin(), (y * 1).sin()), backend="eager")
        x, y = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_()
        kept = []

        def unpack(held):
            kept.append(held[0])
            return held[1]

        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.sum().item(), t), unpack):
            a, b = compiled(x, y)
        a.sum().backward()
        b.sum().backward()
        assert torch.equal(y.grad, y.detach().cos())
        assert {*kept} >= {x.sum().item(), y.sum().item()}

        z = torch.rand(4).requires_grad_()
        shared = z * 1
        a, b = foregrad.compile(lambda x, y: (x.sin(), y.sin()), backend="eager")(x, shared)
        a.sum().backward()
        with torch.no_grad():
            shared.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            b.sum().backward()


def test_anomaly_mode_after_a_part_has_run():
    compiled = foregrad.compile(lambda x, y: (x.sin(), y.cos()), backend="eager")
    x, y = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        a, b = compiled(x, y)
        a.sum().backward()
        b.sum().backward()
    assert torch.equal(y.grad, -y.detach().sin())
