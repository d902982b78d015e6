"""Hooks at second order, saved-tensor hooks, anomaly mode, introspection, tangents of every kind: as in eager."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import foregrad

D = torch.float64


def leaf(*shape):
    return torch.randn(*shape, dtype=D, requires_grad=True)


def model(x, w):
    """Saves what it is given and what it computed in between, not what it returns."""
    h = torch.tanh(x @ w)
    return h @ w + x, (x * x).sum(-1)


def compare(use, fn=model, **settings):
    sides = []
    for function in (fn, foregrad.compile(fn, backend="eager", **settings)):
        torch.manual_seed(0)
        sides.append(use(function))
    wanted, found = sides
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
        else:
            assert a == b


def twice(outputs, inputs):
    grads = torch.autograd.grad(outputs, inputs, create_graph=True)
    return *grads, *torch.autograd.grad(sum(g.pow(2).sum() for g in grads), inputs)


HOOKS = {
    "replaces": lambda g: g * 3,
    "of second order": lambda g: g * g,
    "in place": lambda g: g.mul_(3),
    "only looks": lambda g: None,
}


@pytest.mark.parametrize("where", ["output", "input", "leaf", "gradient"])
@pytest.mark.parametrize("hook", HOOKS)
def test_tensor_hooks_with_create_graph(hook, where):
    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        middle = x * 1.5
        if where == "leaf":
            w.register_hook(HOOKS[hook])
        if where == "input":
            middle.register_hook(HOOKS[hook])
        y, z = f(middle, w)
        if where == "output":
            y.register_hook(HOOKS[hook])
        loss = y.exp().sum() + z.pow(2).sum()
        grads = torch.autograd.grad(loss, [x, w], create_graph=True)
        if where == "gradient":
            grads[0].register_hook(HOOKS[hook])
        return *grads, *torch.autograd.grad(sum(g.pow(2).sum() for g in grads), [x, w])

    compare(use)


def test_hooks_of_gradient_accumulators_with_create_graph():
    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        seen = []
        accumulator = torch.autograd.graph.get_gradient_edge(w).node
        accumulator.register_prehook(lambda grads: seen.append(grads[0].detach().clone()))
        accumulator.register_hook(lambda _, grads: seen.append(grads[0].detach().clone()))
        w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))
        w.register_hook(lambda g: g * g)
        y, z = f(x * 2, w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (y.sum() + z.sum()).backward(create_graph=True)
        return x.grad, w.grad, *seen, *torch.autograd.grad(w.grad.sum(), [x, w])

    compare(use)


def test_hooks_of_several_tensors():
    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        seen = []
        y, z = f(x, w)
        torch.autograd.graph.register_multi_grad_hook(
            (y, z), lambda grads: seen.extend(None if g is None else g.detach().clone() for g in grads)
        )
        grads = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        return *grads, *seen, *torch.autograd.grad(grads[0].pow(2).sum(), [x, w])

    compare(use)


def test_full_backward_hooks_of_a_module_at_second_order():
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        run = foregrad.compile(net, backend="eager") if compile_it else net
        seen = []
        run.register_full_backward_hook(
            lambda m, gi, go, seen=seen: (seen.append(go[0].detach().clone()), (gi[0] * 2,))[1]
        )
        x = torch.linspace(0, 1, 6, dtype=D).view(2, 3).requires_grad_()
        results.append([*twice(run(x).sin().sum(), [x, *list(net.parameters())[:2]]), *seen])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_tensors_inside_the_function(hook):
    def hooked(x, w):
        v = w.view_as(w)  # `w` is the caller's, and a hook on it would see its other uses
        h = torch.tanh(x @ v)
        h.register_hook(HOOKS[hook])
        v.register_hook(HOOKS[hook])
        return h.exp(), (x * x).sum(-1)

    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        y, z = f(x * 1.0, w)
        return y, z, *twice(y.sum() + z.sum(), [x, w])

    compare(use, hooked)


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_saved_tensors_hooks_see_what_is_kept_and_give_it_back(partition):
    packed = []

    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t * 1)[1], lambda t: t * 1):
            y, z = f(x, w)
        assert packed
        return torch.autograd.grad(y.sum() + z.sum(), [x, w])

    compare(use, partition=partition)


def test_a_saved_tensors_hook_that_changes_values_changes_gradients():
    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
            y = f(x, w)
        return torch.autograd.grad(y.sum(), [x, w])

    compare(use, lambda x, w: x * w)


def test_hooks_around_the_first_call_are_not_in_the_graph():
    """The function is captured while they are on, and called without them."""
    compiled = foregrad.compile(lambda x, w: x * w, backend="eager")
    x, w = leaf(3), leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        first = compiled(x, w)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], w * 2)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w).sum(), x)[0], w)


def test_what_is_saved_on_the_cpu_serves_a_second_derivative():
    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        with torch.autograd.graph.save_on_cpu():
            y, z = f(x, w)
            grads = torch.autograd.grad(y.sum() + z.sum(), [x, w], create_graph=True)
        return *grads, *torch.autograd.grad(grads[0].sin().sum(), [x, w])

    compare(use)


@pytest.mark.parametrize("compile_it", [False, True])
def test_anomaly_mode_names_the_line_of_the_call(compile_it):
    def bad(x):
        return torch.sqrt(x * 0).sum()

    f = foregrad.compile(bad, backend="eager") if compile_it else bad
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            out = f(x)  # the line to be named
            with pytest.raises(RuntimeError, match="returned nan values"):
                out.backward()
    said = "\n".join(str(w.message) for w in caught)
    assert "out = f(x)  # the line to be named" in said
    assert __file__.rpartition("/")[2] in said


def two_heads(x, w):
    y = torch.tanh(x @ w)
    z = torch.sqrt(y * 0)  # the line that is to be named
    return y.sum(), z.sum()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("how", ["all", "some", "again", "second order"])
@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_anomaly_mode_names_the_line_inside(partition, how, native):
    with foregrad.config.override(native=native):
        f = foregrad.compile(two_heads, backend="eager", partition=partition)
        x, w = leaf(2, 2), leaf(2, 2)
        f(x, w)[1].backward()  # nan, and nobody asked
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                y, z = f(x, w)
                torch.autograd.grad(y, x, retain_graph=True)
                with pytest.raises(RuntimeError, match=r"(?s)returned nan values.*the line that is to be named"):
                    if how == "all":
                        (y + z).backward()
                    elif how == "some":
                        torch.autograd.grad(z, w)
                    elif how == "again":
                        torch.autograd.grad(y + z, x, create_graph=True)
                    else:
                        third = torch.autograd.grad(z * 1e-300, x, create_graph=True)
                        torch.autograd.grad(third[0].sum(), x)
            with torch.autograd.detect_anomaly(check_nan=False):
                assert torch.autograd.grad(f(x, w)[1], x)[0].isnan().all()


def test_anomaly_mode_names_the_line_of_a_second_derivative():
    def root(x):
        return (x**1.5 * 0).sum()  # its second derivative is 0 times infinity

    x = torch.zeros(2, dtype=D, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = foregrad.compile(root, backend="eager")(x)
        with torch.autograd.detect_anomaly(check_nan=False):
            (first,) = torch.autograd.grad(y, x, create_graph=True)
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="is 0 times infinity"):
            first.sum().backward()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_gradcheck_through_both_partitions(partition, fast):
    compiled = foregrad.compile(model, backend="eager", partition=partition)
    inputs = (leaf(2, 2), leaf(2, 2))
    assert torch.autograd.gradcheck(compiled, inputs, fast_mode=fast, check_undefined_grad=True)
    assert torch.autograd.gradgradcheck(compiled, inputs, fast_mode=fast)


def test_gradcheck_with_batches_and_forward_mode():
    compiled = foregrad.compile(lambda x, w: torch.tanh(x @ w), backend="eager")
    inputs = (leaf(2, 2), leaf(2, 2))
    assert torch.autograd.gradcheck(
        compiled, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )


def test_gradcheck_fails_for_a_wrong_gradient():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    compiled = foregrad.compile(Wrong.apply, backend="eager")
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(compiled, (leaf(2),))


def tangent(kind):
    dense = torch.randn(3, 3, dtype=D)
    return {
        "sparse": dense.relu().to_sparse(),
        "expanded": dense[0].expand(3, 3),
        "strided": torch.randn(6, 6, dtype=D)[::2, ::2],
        "negative": torch._neg_view(dense),
        "zero": torch._efficientzerotensor((3, 3), dtype=D),
    }[kind]


@pytest.mark.parametrize("kind", ["sparse", "expanded", "strided", "negative", "zero"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_tangents_of_every_kind(kind, create_graph):
    def use(f):
        x, w = leaf(3, 3), leaf(3, 3)
        y, _ = f(x, w)
        grads = torch.autograd.grad(y, [x, w], tangent(kind), create_graph=create_graph)
        if not create_graph:
            return [g.to_dense() if g.is_sparse else g for g in grads]
        return *grads, *torch.autograd.grad(sum(g.cos().sum() for g in grads), [x, w])

    if kind == "sparse":  # few of eager's formulas take one: the same tangent, dense
        sides = []
        for densely, f in ((True, model), (False, foregrad.compile(model, backend="eager"))):
            torch.manual_seed(0)
            x, w = leaf(3, 3), leaf(3, 3)
            y, _ = f(x, w)
            seed = tangent(kind).to_dense() if densely else tangent(kind)
            sides.append(torch.autograd.grad(y, [x, w], seed, create_graph=create_graph))
        for a, b in zip(*sides, strict=True):
            torch.testing.assert_close(b, a)
    else:
        compare(use)


@pytest.mark.parametrize("materialize", [False, True])
def test_undefined_tangents_of_a_custom_function(materialize):
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            assert (first is None, second is None) == (False, not materialize)
            return (
                None
                if second is None and first is None
                else (0 if first is None else first * 2) + (0 if second is None else second * 3)
            )

    def first_only(x):
        first, _ = Two.apply(x)
        return first * x

    def use(f):
        x = leaf(3)
        return twice(f(x).sum(), [x])

    compare(use, first_only)


def test_names_and_edges_of_the_graph():
    x, w = leaf(3, 3), leaf(3, 3)
    y, z = foregrad.compile(model, backend="eager")(x, w)
    node = y.grad_fn
    assert isinstance(node, torch.autograd.graph.Node)
    assert node.name() == "CompiledFunctionBackward"
    assert z.grad_fn is node
    assert (y.output_nr, z.output_nr) == (0, 1)
    leaves = [edge.variable for edge, _ in node.next_functions if edge is not None]
    assert {id(t) for t in leaves} == {id(x), id(w)}
    assert torch.autograd.graph.get_gradient_edge(y).node is node
    edge_grad = torch.autograd.grad(y.sum(), [torch.autograd.graph.get_gradient_edge(x)], retain_graph=True)
    torch.testing.assert_close(edge_grad[0], torch.autograd.grad(y.sum(), x)[0])


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_gradients_by_other_inputs_at_each_order(partition):
    """What one derivative computes anew from an input, the next one may have to differentiate by that input."""

    def f(x, w):
        ratio = (w - w.sin()) / (x * x + 1)
        return w - ratio.sin()

    sides = []
    for run in (f, foregrad.compile(f, backend="eager", partition=partition)):
        torch.manual_seed(0)
        x, w = leaf(3, 3), leaf(3, 3)
        y = run(x * 0.5, w * 1.5)
        (first,) = torch.autograd.grad(y.pow(2).sum(), [x], create_graph=True)
        second = torch.autograd.grad(first.pow(2).sum(), [x, w], create_graph=True)
        sides.append([first, *second, *torch.autograd.grad(second[0].pow(2).sum(), [w, x])])
    torch.testing.assert_close(sides[1], sides[0], rtol=1e-8, atol=1e-9)
