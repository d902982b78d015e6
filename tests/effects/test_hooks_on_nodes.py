"""Hooks on autograd nodes, and on several tensors at once: `y.grad_fn.register_hook`, `register_multi_grad_hook`."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook

import foregrad


def tripled(gradients):
    return tuple(None if g is None else g * 3 for g in gradients)


def of_a_result(x):
    y = x.sin() * 2
    y.grad_fn.register_hook(lambda inputs, _: tripled(inputs))
    y.grad_fn.register_prehook(tripled)
    return y, x.cos()


def inside(x):
    y = x.sin()
    y[1:].grad_fn.register_hook(lambda *_: None)  # of a view that nobody needs
    y.grad_fn.register_hook(lambda inputs, _: tripled(inputs))
    return (y * y).sum(), y.exp()


def of_a_view_used_inside(x):
    view = x.sin()[1:]
    view.grad_fn.register_hook(lambda inputs, _: tripled(inputs))
    return view * 2


def taken_away(x):
    y = x.sin()
    view = y[1:]
    view.grad_fn.register_hook(lambda inputs, _: tripled(inputs)).remove()
    return view, y


def of_a_modules_output(x):
    layer = torch.nn.Flatten()
    layer.register_full_backward_hook(lambda module, inputs, outputs: tripled(inputs))
    layer(x.sin())
    return x * 2


def of_several_inside(x):
    a, b = x * 2, x.sin()
    a.register_hook(lambda g: g * 2)
    register_multi_grad_hook([a, b], lambda gradients: None)
    return a.sum() + (b * b).sum()


def of_an_argument(x):
    register_multi_grad_hook([x], lambda gradients: None)
    return x.sin()


def of_a_returned_view(x):
    y = x.sin()
    view = y[1:]
    view.grad_fn.register_hook(lambda inputs, _: tripled(inputs))
    return view, y


def before_a_returned_view(x):
    y = x.sin()
    view = y[1:]
    view.grad_fn.register_prehook(tripled)
    return view, y


def of_a_leaf(x):
    node = x.expand_as(x).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: None)
    return x.sin()


def gradients(function, x):
    out = function(x)
    out = out if isinstance(out, tuple) else (out,)
    (sum((o * (k + 1)).sum() for k, o in enumerate(out))).backward()
    return [o.detach() for o in out], x.grad


def compare(function, compiled):
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4, requires_grad=True)
        ours, theirs = gradients(compiled, x), gradients(function, x.detach().requires_grad_())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [of_a_result, of_a_view_used_inside, taken_away, of_several_inside],
    ids=lambda f: f.__name__,
)
def test_compiled_with_the_hook_in_the_backward(function):
    compare(function, foregrad.compile(function, backend="eager"))


@pytest.mark.parametrize(
    "function", [inside, of_a_returned_view, before_a_returned_view, of_a_leaf], ids=lambda f: f.__name__
)
def test_eager_where_the_backward_does_not_run_the_node(function):
    refusing = foregrad.compile(function, backend="eager", on_unsupported="raise")
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match="none of its own backward"):
        refusing(torch.randn(3, 4, requires_grad=True))
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"register_(pre)?hook"):
        compare(function, foregrad.compile(function, backend="eager", on_unsupported="eager"))


def test_what_pytorch_registers_for_modules_is_no_hook_of_the_programs():
    compare(of_a_modules_output, foregrad.compile(of_a_modules_output, backend="eager"))


def test_no_gradients_no_hooks():
    def function(x):
        x.detach().requires_grad_().sin()[1:].grad_fn.register_hook(lambda *_: None)
        return x.detach() * 2

    compiled = foregrad.compile(function, backend="eager")
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(compiled(x), x * 2)


def returned(x):
    x.register_hook(lambda g: g * 10)
    return x


def used(x):
    x.register_hook(lambda g: g * 10)
    return x * 2


def viewed(x):
    x.register_hook(lambda g: g * 10)
    return x.view(-1)


LOG = []


def with_a_value_of_the_call(x):
    s = x.detach().sum()
    x.register_hook(lambda g: g * s)
    return x * 2


def with_a_list(x):
    x.register_hook(lambda g: LOG.append(g.tolist()))
    return x * 2


def beside_other_uses(called, leaf, *, asks=True):
    """Of an argument that is used outside, too, with the hooks that three calls leave on it, and by itself."""
    LOG.clear()
    found = []
    for _ in range(3):
        x = torch.arange(1.0, 5.0).requires_grad_()
        y = x if leaf else x * 3
        for _ in range(3):
            out = called(y)
        loss = out.sum() + (y * 2).sum()
        g = torch.autograd.grad(loss, y, retain_graph=True)[0].tolist() if asks else None
        loss.backward()
        found.append((g, x.grad.tolist(), list(LOG)))
    return found


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("function", [returned, used, viewed], ids=lambda f: f.__name__)
def test_a_hook_left_on_an_argument_sees_its_other_uses_too(function, leaf):
    compiled = foregrad.compile(function, backend="eager")
    assert beside_other_uses(compiled, leaf) == beside_other_uses(function, leaf)
    assert len(compiled.foregrad.specializations) == 1


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("function", [of_an_argument, with_a_value_of_the_call, with_a_list], ids=lambda f: f.__name__)
def test_a_hook_that_no_call_could_leave_makes_it_run_eagerly(function, leaf):
    asks = function is not of_an_argument  # PyTorch's own hooks of several tensors don't work then
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(
        foregrad.errors.ForegradWarning, match=r"puts a hook on (a tensor from outside|an autograd node)"
    ):
        found = beside_other_uses(compiled, leaf, asks=asks)
    assert found == beside_other_uses(function, leaf, asks=asks)
    assert not compiled.foregrad.specializations


def test_a_hook_left_on_a_parameter_keeps_what_it_sees_in_its_module():
    class Kept(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
            self.seen = []

        def keep(self, gradient):
            self.seen.append(gradient.tolist())

        def forward(self, x):
            self.weight.register_hook(self.keep)
            return self.weight * x

    plain, kept = Kept(), Kept()
    compiled = foregrad.compile(kept, backend="eager")
    for i in range(3):
        for model in (plain, compiled):
            (model(torch.ones(2) + i).sum() + model.weight.sum()).backward()
    assert kept.seen == plain.seen
    assert torch.equal(kept.weight.grad, plain.weight.grad)
    assert len(compiled.foregrad.specializations) == 1
