"""The ways autograd is used on what a compiled function returns: all as in eager."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import foregrad


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def model(x, w):
    return torch.tanh(x @ w).exp(), (x * x).sum(-1)


@pytest.fixture
def both():
    """(function, its inputs) for eager and compiled, with equal inputs."""

    def make(fn=model, shapes=((3, 3), (3, 3))):
        sides = []
        for function in (fn, foregrad.compile(fn, backend="eager")):
            torch.manual_seed(0)
            sides.append((function, [leaf(*shape) for shape in shapes]))
        return sides

    return make


def same(sides, use):
    """`use(function, *inputs)` gives equal tensors on both sides."""
    wanted, found = (use(function, *inputs) for function, inputs in sides)
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found, strict=True):
        assert (a is None) == (b is None)
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
        else:
            assert a == b


def test_two_backwards_with_retain_graph(both):
    def use(f, x, w):
        y, z = f(x, w)
        y.sum().backward(retain_graph=True)
        z.sum().backward(retain_graph=True)
        (y.sum() * z.sum()).backward()
        return x.grad, w.grad

    same(both(), use)


def test_a_second_backward_without_the_graph_raises(both):
    for f, (x, w) in both():
        y, _ = f(x, w)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()


def test_create_graph_in_backward_accumulates_a_differentiable_gradient(both):
    def use(f, x, w):
        f(x, w)[0].sum().backward(create_graph=True)
        return (x.grad, *torch.autograd.grad(x.grad.pow(2).sum(), [x, w]))

    torch.set_warn_always(True)  # PyTorch warns once in a process
    try:
        with pytest.warns(UserWarning, match="create_graph"):
            same(both(), use)
    finally:
        torch.set_warn_always(False)


def test_inputs_restricts_what_is_accumulated(both):
    def use(f, x, w):
        f(x, w)[0].sum().backward(inputs=[w])
        return x.grad, w.grad

    same(both(), use)


def test_gradients_accumulate_over_calls(both):
    def use(f, x, w):
        for _ in range(3):
            f(x, w)[0].sum().backward()
        return x.grad, w.grad

    same(both(), use)


@pytest.mark.parametrize("which", [0, 1])
def test_some_outputs_only_twice_differentiated(both, which):
    def use(f, x, w):
        y = f(x, w)[which]
        grads = torch.autograd.grad(y.sum(), [x, w], create_graph=True, allow_unused=True)
        total = sum(g.pow(2).sum() for g in grads if g is not None)
        return (*grads, *torch.autograd.grad(total, [x, w], allow_unused=True))

    same(both(), use)


def test_other_inputs_at_second_order_than_at_first(both):
    def use(f, x, w):
        (first,) = torch.autograd.grad(f(x, w)[0].sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.sin().sum(), w)

    same(both(), use)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "requires grad", "from a graph"])
def test_tangents_of_every_layout(both, kind):
    def tangent():
        torch.manual_seed(5)
        t = torch.randn(3, 3, dtype=torch.float64)
        if kind == "expanded":
            return torch.randn(3, dtype=torch.float64).expand(3, 3), []
        if kind == "transposed":
            return t.t(), []
        t.requires_grad_()
        return (t, [t]) if kind == "requires grad" else (t.exp().t(), [t])

    def use(f, x, w):
        t, extra = tangent()
        grads = torch.autograd.grad(f(x, w)[0], [x, w], t, create_graph=True)
        return *grads, *torch.autograd.grad(sum(g.cos().sum() for g in grads), [x, w, *extra])

    same(both(), use)


def test_chained_with_eager_code_in_between(both):
    def use(f, x, w):
        y = f(f(x * 2, w)[0].sin(), w)[0]
        grads = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        deeper = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), [x, w], create_graph=True)
        return *grads, *deeper, *torch.autograd.grad(sum(g.sin().sum() for g in deeper), [x, w])

    same(both(), use)


def test_hooks_on_tensors_leaves_and_modules(both):
    def use(f, x, w):
        seen = []
        x.register_hook(lambda g: g * 2)
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y, _ = f(x, w)
        y.register_hook(lambda g: seen.append(g.clone()))
        y.register_hook(lambda g: g.mul_(3))
        y.pow(2).sum().backward()
        return x.grad, w.grad, *seen

    same(both(), use)


def test_a_module_with_full_backward_hooks():
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        run = foregrad.compile(net, backend="eager") if compile_it else net
        seen = []
        run.register_full_backward_hook(lambda m, gi, go, seen=seen: seen.extend(t.clone() for t in (*gi, *go)))
        x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        run(x).sum().backward()
        results.append([x.grad, *seen, *(p.grad for p in net.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_saved_tensors_on_the_cpu_and_twice_differentiated(both):
    def use(f, x, w):
        with torch.autograd.graph.save_on_cpu():
            y = f(x, w)[0]
        grads = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        return *grads, *torch.autograd.grad(grads[0].sin().sum(), [x, w])

    same(both(), use)


def test_anomaly_mode(both):
    def use(f, x, w):
        with torch.autograd.detect_anomaly(check_nan=True):
            grads = torch.autograd.grad(f(x, w)[0].sum(), [x, w], create_graph=True)
            return *grads, *torch.autograd.grad(grads[0].sum(), [x, w])

    with pytest.warns(UserWarning, match="Anomaly"):
        same(both(), use)


def test_random_results_are_those_of_the_forward(both):
    def noisy(x, w):
        noise = torch.randn_like(x)
        return torch.nn.functional.dropout((x + noise) @ w, 0.4).sin(), (x * noise).exp()

    def use(f, x, w):
        torch.manual_seed(7)
        y, z = f(x, w)
        grads = torch.autograd.grad((y.sum(), z.sum()), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), [x, w])
        return y, z, *grads, *second, torch.rand(2)

    same(both(noisy), use)


def test_inputs_and_buffers_that_the_function_writes(both):
    def writes(x, buffer):
        scaled = torch.tanh(x)  # whose derivative does not read x
        buffer.add_(x.detach())
        x.add_(scaled * buffer)
        return scaled * buffer

    def use(f, x, _):
        buffer = torch.ones(3, 3, dtype=torch.float64)
        start = x * 1.5
        y = f(start, buffer)
        (first,) = torch.autograd.grad((y + start).sum(), x, create_graph=True)
        return y, buffer, first, *torch.autograd.grad(first.pow(2).sum(), x)

    same(both(writes), use)


def test_an_input_changed_after_the_call_keeps_its_history(both):
    """The gradient flows to what the input was, not to what it became."""

    def use(f, x, w):
        middle = x + 1
        y = f(middle, w)
        middle.mul_(2)
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return y, middle, first, *torch.autograd.grad(y.sum(), w, create_graph=True)

    def linear_in_x(x, w):
        return x.cumsum(0) + (w * w).sum()

    def use_twice(f, x, w):
        results = use(f, x, w)
        return *results, *torch.autograd.grad(results[-1].sum(), w)

    same(both(linear_in_x), use_twice)


def test_a_changed_saved_value_raises_as_in_eager(both):
    for f, (x, w) in both():
        y, _ = f(x, w)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_cannot_be_differentiated_twice_raises_where_eager_does(both):
    def flash(x, w):
        q = x.view(1, 1, 3, 3)
        return torch.nn.functional.scaled_dot_product_attention(q, q, w.view(1, 1, 3, 3))

    for f, (x, w) in both(flash):
        (first,) = torch.autograd.grad(f(x, w).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.autograd.grad(first.sum(), x)


def test_gradcheck_and_gradgradcheck_pass():
    torch.manual_seed(0)
    compiled = foregrad.compile(model, backend="eager")
    inputs = (leaf(2, 3), leaf(3, 3))
    assert torch.autograd.gradcheck(compiled, inputs)
    assert torch.autograd.gradgradcheck(compiled, inputs)


def test_sparse_and_undefined_tangents(both):
    def use(f, x, w):
        y, z = f(x, w)
        sparse = torch.eye(3, dtype=torch.float64).to_sparse()
        grads = torch.autograd.grad((y * 2).sum() + torch.sparse.sum(sparse * y), [x, w], retain_graph=True)
        return *grads, *torch.autograd.grad(z.sum(), [x, w], allow_unused=True)

    same(both(), use)


def test_without_it_the_error_says_how_to_get_it():
    with foregrad.config.override(higher_order=False):
        compiled = foregrad.compile(model, backend="eager")
        x, w = leaf(3, 3), leaf(3, 3)
        y, _ = compiled(x, w)
    with pytest.raises(foregrad.errors.UnsupportedError, match="higher_order"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_first_order_training_saves_nothing_for_it():
    """With leaves, the node holds on to the same tensors as without higher orders."""
    held = []
    for setting in (True, False):
        with foregrad.config.override(higher_order=setting):
            compiled = foregrad.compile(model, backend="eager")
            torch.manual_seed(0)
            x, w = leaf(3, 3), leaf(3, 3)
            y, _ = compiled(x, w)
        kept = list(y.grad_fn.saved_tensors)
        held.append(([t.shape for t in kept], hasattr(y.grad_fn, "trails")))
    assert held[0] == held[1]
    assert held[0][1] is False


def test_neither_arguments_nor_graphs_are_held_afterwards():
    compiled = foregrad.compile(model, backend="eager")
    x, w = leaf(3, 3), leaf(3, 3)
    middle = x * 2
    y, _ = compiled(middle, w)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(first.sum(), w)
    alive = [weakref.ref(t) for t in (x, w, middle, y, first)]
    del x, w, middle, y, first, _
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_once_differentiable_among_others_raises_as_in_eager():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    for run in (Once.apply, foregrad.compile(Once.apply, backend="eager")):
        x, w = (torch.ones(3, requires_grad=True) for _ in range(2))
        (g,) = torch.autograd.grad((run(x) * w).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (g.sum() + x.sum() + w.sum()).backward()
