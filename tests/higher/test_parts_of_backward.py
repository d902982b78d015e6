"""Backwards through parts of a function, one after the other: eager's nodes run once each, unless the graph is kept."""

import gc
import itertools
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import foregrad
from tests.covering import shared

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


# Their derivatives find in what is saved more than they need, or want the history of what another part read.
SAVED_FOR_SEVERAL = {
    "a derivative that is an output": lambda x, y: ((h := x.sin()), h * y),
    "a copy of an argument": lambda x, y: (
        torch.nn.functional.conv1d(x[None], y[None].expand(3, 3, 3).contiguous()),
        x @ y,
    ),
    "a transposed argument": lambda x, y: (x @ (y.t() * 2).contiguous(), x * y),
    "nothing": lambda x, y: (x * torch.ones(SIDE, SIDE), y * 5.0),
    "outputs, one of the other": lambda x, y: ((h := x.exp()), (k := (h * y).tanh()), k * h),
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


@pytest.mark.parametrize(
    ("name", "native"), [*((name, True) for name in PROGRAMS), *((name, False) for name in shared(PROGRAMS, 0, 2))]
)
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


def derivatives(function, steps, of):
    """For each step (the output, the input, whether the graph is to be differentiable) the gradient.

    `of`: what the arguments are made from the leaves by.
    """
    torch.manual_seed(1)
    leaves = [torch.rand(SIDE, SIDE).requires_grad_() for _ in range(2)]
    torch.manual_seed(0)
    inputs = [of(leaf) for leaf in leaves]
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    found = []
    for number, (output, wanted, create) in enumerate(steps, 1):
        root = (outputs[output] * number).sum()
        try:
            found += torch.autograd.grad(
                root, inputs[wanted], retain_graph=False, create_graph=create, allow_unused=True
            )
        except RuntimeError as error:
            assert "a second time" in str(error)
            found.append("ran twice")
            break
    return found, second_derivative(found[-1], leaves)


def second_derivative(gradient, leaves):
    """Of what the last step gave; zeros where there is none. A node that has run may be read once more by ours."""
    if not isinstance(gradient, torch.Tensor) or not gradient.requires_grad:
        return "none"
    try:
        found = torch.autograd.grad(gradient.square().sum(), leaves, allow_unused=True)
    except RuntimeError as error:
        assert "a second time" in str(error)
        return "ran twice"
    return [torch.zeros(SIDE, SIDE) if g is None else g for g in found]


# What the node in Python keeps does not depend on what comes before it: there, of leaves alone.
@pytest.mark.parametrize(
    ("of", "native"),
    [(lambda leaf: leaf, True), (torch.abs, True), (lambda leaf: leaf, False)],
    ids=["leaves-native", "results-native", "leaves-python"],
)
@pytest.mark.parametrize("name", [*PROGRAMS, *SAVED_FOR_SEVERAL])
def test_derivatives_one_after_the_other(name, of, native):
    """What the parts that ran gave up is found in another way, or is not read."""
    function = (PROGRAMS | SAVED_FOR_SEVERAL)[name]
    count = len(outputs) if isinstance(outputs := function(*torch.ones(2, 3, 3).requires_grad_()), tuple) else 1
    parts = [*itertools.product(range(count), range(2))]
    with foregrad.config.override(native=native):
        compiled = foregrad.compile(function, backend="eager")
        for first, second in itertools.product(parts, parts):
            for steps in (((*first, True), (*second, True)), ((*first, False), (*second, True))):
                (eager, eager_second), (ours, second) = (derivatives(f, steps, of) for f in (function, compiled))
                assert same(eager, ours), (steps, eager, ours)
                assert eager_second == "ran twice" or same(eager_second, second), (steps, eager_second, second)


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


class Token:
    """Lives as long as the node that holds it."""


@pytest.mark.parametrize("native", [True, False])
def test_an_output_that_is_saved_keeps_its_history_and_hooks_after_another_part(native):
    def function(x, y):
        return x.exp(), y.cos()

    found, seen = [], []
    with foregrad.config.override(native=native):
        for run in (function, foregrad.compile(function, backend="eager")):
            x, y = torch.full((2,), 0.5).requires_grad_(), torch.full((2,), 0.3).requires_grad_()
            a, b = run(x, y)
            hooked = []
            a.register_hook(hooked.append)
            torch.autograd.grad(b.sum(), y, retain_graph=False)
            (first,) = torch.autograd.grad(a.sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.sum(), x)[0])
            seen.append([gradient.detach().clone() for gradient in hooked])
            a.grad_fn.metadata["token"] = token = Token()
            node = weakref.ref(token)
            del a, b, first, hooked, token
            gc.collect()
            assert node() is None, "the node keeps itself"
    assert torch.equal(*found)
    assert len(seen[0]) == len(seen[1]) == 2 and all(map(torch.equal, *seen))
