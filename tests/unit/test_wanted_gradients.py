"""`autograd.grad(y, x)` and `backward(inputs=...)` compute no gradient that nobody waits for, as in eager."""

import itertools

import pytest
import torch

import foregrad
from foregrad.backends.debugging import op_counts
from foregrad.backends.eager import eager_compiler
from foregrad.graph.role import role_of


@pytest.fixture(params=[True, False], ids=["native", "python"])
def counted(request):
    """`compile(f)` and the operators of each graph that was compiled of it, backwards marked."""
    graphs = []

    def compiler(gm, inputs):
        graphs.append((role_of(gm).phase, op_counts(gm)))
        return eager_compiler(gm, inputs)

    def compile(f):
        with foregrad.config.override(native=request.param):
            call = foregrad.compile(f, backend=compiler)

        def run(*args):
            with foregrad.config.override(native=request.param):
                return call(*args)

        return run

    compile.graphs = graphs
    return compile


def values(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def two_layers(x, v, w):
    return torch.tanh(torch.tanh(x @ v) @ w)


def linear_at_the_end(x, v, w):
    return torch.tanh(x @ v) @ w


def same(found):
    expected, actual = found
    for a, b in zip(expected, actual, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def backwards(compile):
    return [counts["aten.mm.default"] for phase, counts in compile.graphs if phase == "backward"]


@pytest.mark.parametrize("wanted, products", [([0], 2), ([2], 1), ([1, 2], 3), ([0, 1, 2], 4)])
def test_only_what_leads_to_the_inputs_named_is_computed(counted, wanted, products):
    found = []
    for f in (two_layers, counted(two_layers)):
        inputs = values((5, 4), (4, 4), (4, 4))
        out = f(*inputs).sum()
        found.append(torch.autograd.grad(out, [inputs[i] for i in wanted], retain_graph=True))
        rest = torch.autograd.grad(out, inputs)
        found[-1] = [*found[-1], *rest]
    same(found)
    assert backwards(counted) == ([4] if products == 4 else [products, 4])


def test_backward_into_some_inputs(counted):
    found = []
    for f in (two_layers, counted(two_layers)):
        x, v, w = values((5, 4), (4, 4), (4, 4))
        out = f(x.sin(), v, w).sum()  # an input that is no leaf, between
        out.backward(inputs=[x, w])
        found.append([x.grad, v.grad, w.grad])
    same(found)
    assert backwards(counted) == [3]


def test_hooks_on_what_is_computed_run(counted):
    seen = []
    for f in (two_layers, counted(two_layers)):
        x, v, w = values((5, 4), (4, 4), (4, 4))
        between = x * 2
        between.register_hook(seen.append)
        v.register_hook(lambda g: seen.append("not asked for"))
        torch.autograd.grad(f(between, v, w).sum(), x)
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_of_some_outputs_into_some_inputs(counted):
    def two(x, v, w):
        return (x @ v).sin(), (x @ w).cos()

    call, found = counted(two), []
    for which, wanted in itertools.product(range(2), ([0], [1], [2], [0, 2])):
        found = []
        for f in (two, call):
            inputs = values((5, 4), (4, 4), (4, 4))
            out = f(*inputs)[which].sum()
            found.append(torch.autograd.grad(out, [inputs[i] for i in wanted], allow_unused=True))
        same(found)


@pytest.mark.parametrize(
    ("function", "products"),
    # The output of `tanh` is saved: a second derivative goes through its history too, by a backward of its own.
    [(linear_at_the_end, [2, 2, 2]), (two_layers, [2, 2, 3, 2])],
)
def test_second_derivatives_of_some_inputs_only(counted, function, products):
    """The Laplacian of a network: nobody wants the gradients of the weights before the last backward."""
    found = []
    for f in (function, counted(function)):
        x, v, w = values((5, 4), (4, 4), (4, 4))
        (first,) = torch.autograd.grad(f(x, v, w).sum(), x, create_graph=True)
        second = [torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(4)]
        sum(second).square().mean().backward()
        found.append([first, *second, x.grad, v.grad, w.grad])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)
    assert [counts["aten.mm.default"] for phase, counts in counted.graphs if phase == "forward"] == products


def test_the_next_derivative_may_want_others(counted):
    found = []
    for f in (two_layers, counted(two_layers)):
        x, v, w = values((5, 4), (4, 4), (4, 4))
        out = f(x, v, w).sum()
        (of_x,) = torch.autograd.grad(out, x, create_graph=True)
        (of_w,) = torch.autograd.grad(out, w, create_graph=True)
        mixed = torch.autograd.grad(of_x.square().sum() + of_w.sin().sum(), (v, x), create_graph=True)
        found.append([of_x, of_w, *mixed, *torch.autograd.grad(mixed[0].sum(), (w, x))])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


def test_ever_other_inputs_take_the_whole_backward_in_the_end(counted):
    def many(*xs):
        return sum(x.sin() for x in xs)

    call = counted(many)
    inputs = values(*[(3,)] * 20)
    for i in range(20):
        (gradient,) = torch.autograd.grad(call(*inputs).sum(), inputs[i])
        assert torch.equal(gradient, inputs[i].cos())
    counts = [graph["aten.cos.default"] for phase, graph in counted.graphs if phase == "backward"]
    assert counts == [1] * 16 + [20]


def of_an_input(x):
    with torch.no_grad():
        return x[0]


def of_a_result(x):
    y = x * 2
    with torch.no_grad():
        return y[0]


def of_an_output(x):
    y = x * 2
    with torch.no_grad():
        v = y[0]
    return v, y


def marked(x):
    y = x * 2
    with torch.no_grad():
        v = y[0]
    return v.requires_grad_()


@pytest.mark.parametrize("f", [of_an_input, of_a_result, of_an_output, marked])
def test_views_made_under_no_grad_take_gradients_only_once_marked(f):
    for call in (f, foregrad.compile(f, backend="eager")):
        (x,) = values((3, 2))
        out = call(x)
        view = out[0] if isinstance(out, tuple) else out
        assert view.requires_grad and view.is_leaf and view.grad_fn is None
        view.mul(3).sum().backward()
        assert (view.grad is not None) == (f is marked)
        assert x.grad is None
