"""Gradients that are wrapper subclasses where the input is none, and gradients of another kind than the result."""

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import foregrad
from foregrad.errors import UnsupportedError

from .wrappers import Logging, Quantised, Unit, described, nested, two


def compiled(f, **settings):
    return foregrad.compile(f, **{"backend": "eager", "on_unsupported": "raise", **settings})


def ones(like):
    return torch.ones(like.shape)


def pair(like):
    return TwoTensor(ones(like), ones(like) * 2)


def same(scenario, f, make, **settings):
    """`scenario(call, *args)` gives the same for the compiled function, in three calls of other numbers."""
    fast = compiled(f, **settings)
    for seed in range(3):
        found = []
        for call in (fast, f):
            torch.manual_seed(seed)
            found.append(described(scenario(call, *make())))
        assert found[0] == found[1]
    return fast


def weight_and_input():
    return two(3, 3, grad=True), torch.randn(2, 3, requires_grad=True)


def layer(w, x):
    return (x @ w).sin()


def both(w, x):
    return (x.exp() @ w).sin(), (x.exp() @ w).cos()


def gradients_of(*tangents):
    def scenario(call, w, x):
        results = call(w, x)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [make(r) for make, r in zip(tangents, results, strict=True)])
        return [*results, w.grad, x.grad]

    return scenario


# -------------------------------------------------------------------- of a plain input


PLAIN_INPUTS = {
    "two": (layer, weight_and_input, pair),
    "nested": (layer, lambda: (nested(3, 3, grad=True), weight_and_input()[1]), lambda r: TwoTensor(pair(r), pair(r))),
    "unit": (
        lambda w, x: w * x.exp(),
        lambda: (Unit(torch.randn(3), 1).requires_grad_(), torch.randn(3, requires_grad=True)),
        lambda r: Unit(ones(r), 1),
    ),
    "logging": (
        lambda w, x: w * x.exp(),
        lambda: (Logging(torch.randn(3)).requires_grad_(), torch.randn(3, requires_grad=True)),
        lambda r: Logging(ones(r)),
    ),
    "weight_without_gradient": (layer, lambda: (two(3, 3), weight_and_input()[1]), pair),
    "view": (lambda w, x: (x[:1] @ w).sin(), weight_and_input, pair),
    "made_inside": (
        lambda a, x: (TwoTensor(a, a) * x).sin(),
        lambda: (torch.randn(3), torch.randn(3, requires_grad=True)),
        pair,
    ),
}


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("name", PLAIN_INPUTS)
def test_the_gradient_of_a_plain_input_is_a_wrapper(name):
    f, make, tangent = PLAIN_INPUTS[name]
    same(gradients_of(tangent), f, make)


def test_with_a_history():
    def scenario(call, w, x):
        hidden = (x * 2).tanh()
        call(w, call(w, hidden)).backward(pair(x))
        return [w.grad, x.grad]

    same(scenario, layer, weight_and_input)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by Dynamo
@pytest.mark.parametrize("through_dynamo", [False, True])
def test_an_embedding_in_front(through_dynamo):
    def trained(compile_it):
        torch.manual_seed(0)
        embedding, linear = torch.nn.Embedding(7, 3), torch.nn.Linear(3, 3)
        for name, p in list(linear.named_parameters()):
            setattr(linear, name, torch.nn.Parameter(TwoTensor(p.detach(), p.detach() + 1)))
        call, found = compile_it(linear), []
        for step in range(3):
            result = call(embedding(torch.tensor([1, step, 2])).tanh())
            result.backward(pair(result))
            found.append(described([result, embedding.weight.grad, linear.weight.grad, linear.bias.grad]))
        return found

    options = {"backend": "eager"}
    through = (lambda m: torch.compile(m, backend="foregrad", options=options)) if through_dynamo else compiled
    assert trained(through) == trained(lambda module: module)


def test_into_a_gradient_that_is_there():
    def scenario(call, w, x):
        x.grad = ones(x)
        return gradients_of(pair)(call, w, x)

    same(scenario, layer, weight_and_input)


def mixed(w, x):
    hidden = x.sin()
    return (hidden @ w).sin(), hidden * 2


@pytest.mark.parametrize("which", [0, 1])
def test_where_only_some_results_give_a_wrapper(which):
    def one_of(call, w, x):
        result = call(w, x)[which]
        return list(torch.autograd.grad(result, x, [pair, ones][which](result)))

    same(one_of, mixed, weight_and_input)
    same(gradients_of(pair, ones), mixed, weight_and_input)


def test_of_an_input_that_is_written_to():
    def f(w, x):
        x.mul_(2)
        return x @ w

    def scenario(call, w, x):
        written = x * 1
        result = call(w, written)
        torch.autograd.backward([result, written], [pair(result), ones(written)])
        return [w.grad, x.grad, written]

    same(scenario, f, weight_and_input)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_second_derivatives_of_a_plain_input(with_gradient):
    def scenario(call, w, x):
        w = w.detach().requires_grad_(with_gradient)
        tangent = pair(x).requires_grad_()
        inputs = [x, tangent, w] if with_gradient else [x, tangent]
        (first,) = torch.autograd.grad(call(w, x), x, tangent, create_graph=True)
        return [first, *torch.autograd.grad(first * first, inputs, pair(x))]

    same(scenario, lambda w, x: (x @ w).sin() * x, weight_and_input)


@pytest.mark.parametrize("settings", [{"partition": "min_cut"}, {"dynamic": True}], ids=["min_cut", "dynamic"])
def test_settings(settings):
    sizes = iter([2, 2, 3, 3, 4, 4])
    make = lambda: (two(3, 3, grad=True), torch.randn(next(sizes), 3, requires_grad=True))
    fast = same(gradients_of(pair, ones), both, make, **settings)
    assert len(fast.foregrad.specializations) == (1 if "dynamic" in settings else 2)


# -------------------------------------------------------------------- of another kind than the result


KINDS = {
    "plain": (layer, weight_and_input, ones),
    "of_another_class": (layer, weight_and_input, lambda r: Unit(ones(r), 1)),
    "nested": (lambda w, x: w.sin() * 2, weight_and_input, lambda r: TwoTensor(pair(r), pair(r))),
    "for_a_plain_result": (lambda w, x: x.sin(), weight_and_input, pair),
    "of_other_metadata": (
        lambda a, x: a * x.exp(),
        lambda: (Unit(torch.randn(3), 1).requires_grad_(), torch.randn(3, requires_grad=True)),
        lambda r: Unit(ones(r), 5),
    ),
    "plain_for_a_unit": (
        lambda a, x: a * x.exp(),
        lambda: (Unit(torch.randn(3), 1).requires_grad_(), torch.randn(3, requires_grad=True)),
        ones,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_tangent_of_another_kind(name):
    f, make, tangent = KINDS[name]
    fast = same(gradients_of(tangent), f, make)
    assert len(fast.foregrad.specializations) == 1


def test_one_graph_for_each_kind():
    """The backward is captured once for a kind, and what is told of two results is told apart."""
    made = []

    def counting(graph, inputs):
        made.append(graph)
        return graph.forward

    fast = compiled(both, backend=(counting, counting))
    for tangents in ([ones, pair], [pair, ones], [ones, pair], [ones, ones], [pair, ones]):
        torch.manual_seed(0)
        args = weight_and_input()
        found = described(gradients_of(*tangents)(fast, *args))
        torch.manual_seed(0)
        assert found == described(gradients_of(*tangents)(both, *weight_and_input()))
    assert len(made) == 1 + 3


class Dequantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, quantised):
        return quantised.dequantised()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(1, keepdim=True) / 127
        return Quantised((x / scale).round().to(torch.int8), scale)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_quantised_result_that_is_dequantised_outside():
    def scenario(call, x):
        values = Dequantise.apply(call(x))
        (values * values).sum().backward()
        return [values, x.grad]

    same(scenario, lambda x: Quantise.apply(x.sin()), lambda: [torch.randn(3, 4, requires_grad=True)])


def test_the_values_of_a_jagged_result():
    def scenario(call, values):
        jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
        call(jagged).values().sin().sum().backward()
        return [values.grad]

    same(scenario, lambda a: a.sin() * 2, lambda: [torch.randn(5, 3, requires_grad=True)])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_that_is_yet_to_arrive_is_waited_for(backend):
    def scenario(call, x):
        call(x).backward(AsyncCollectiveTensor(ones(x)))
        return [x.grad]

    same(scenario, lambda x: x * 2, lambda: [torch.randn(3, requires_grad=True)], backend=backend)


def test_parts_of_the_backward():
    def in_turn(retain):
        def scenario(call, w, x):
            first, second = call(w, x)
            first.backward(ones(first), retain_graph=retain)
            second.backward(ones(second))
            return [w.grad, x.grad]

        return scenario

    same(in_turn(retain=False), both, weight_and_input)
    same(in_turn(retain=True), both, weight_and_input)
    same(lambda call, w, x: list(torch.autograd.grad(call(w, x)[0], w, ones(x))), both, weight_and_input)
    first = compiled(both)(*weight_and_input())[0]
    first.backward(ones(first))
    with pytest.raises(RuntimeError, match="a second time"):
        first.backward(ones(first))


@pytest.mark.parametrize("tangent", [ones, pair])
def test_derivatives_of_any_order(tangent):
    def scenario(call, w, x):
        result = call(w, x)
        given = tangent(result).requires_grad_()
        firsts = torch.autograd.grad(result, [w, x], given, create_graph=True)
        square = firsts[0] * firsts[0]
        return [*firsts, *torch.autograd.grad(square, [w, x, given], torch.ones_like(square.detach()))]

    same(
        scenario, lambda w, x: (x @ w).sin() * x, lambda: (two(3, 3, grad=True), torch.randn(3, 3, requires_grad=True))
    )


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["plain", "of_other_metadata"])
def test_sizes_that_vary(name, dynamic):
    f, _, tangent = KINDS[name]
    sizes = iter([2, 2, 3, 3, 4, 4])

    def make():
        x = torch.randn(next(sizes), 3, requires_grad=True)
        return two(3, 3, grad=True) if name == "plain" else Unit(torch.randn(x.shape), 1).requires_grad_(), x

    same(gradients_of(tangent), f, make, dynamic=dynamic)


def test_without_what_it_takes_it_is_refused():
    with foregrad.config.override(higher_order=False):
        result = compiled(lambda a: a * 2)(two(3, grad=True))
    with pytest.raises(UnsupportedError, match="is a Tensor, and its backward was compiled for a different class"):
        result.backward(ones(result))


# -------------------------------------------------------------------- of what a wrapper is made of


LEAVES = {
    "history_inside": lambda a, b: (Unit(a * 2, 1), a * 3),
    "an_input_inside": lambda a, b: Unit(a, 1),
    "requires_grad_too": lambda a, b: TwoTensor(a * 2, a.exp() * b),
    "marked": lambda a, b: Unit(a * 2, 1).requires_grad_(),
    "marked_without_history": lambda a, b: Unit(b * 2, 1).requires_grad_(),
    "quantised": lambda a, b: Quantised((b * 9).to(torch.int8), a.abs().amax(0, keepdim=True)),
    "nested": lambda a, b: TwoTensor(TwoTensor(a * 2, a), TwoTensor(a, a.exp())),
    "parameter": lambda a, b: torch.nn.Parameter(Unit(b * 2, 1)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_wrapper_that_is_a_leaf_over_tensors_with_histories(name):
    """Gradients by it end there; what it holds keeps its own history."""

    def ends(result):
        names = result.__tensor_flatten__()[0] if hasattr(result, "__tensor_flatten__") else ()
        return [end for name in names for end in ends(getattr(result, name))] or [result]

    def scenario(call, a, b):
        results = call(a, b)
        results = results if isinstance(results, tuple) else (results,)
        parts = [part for result in results for part in ends(result)]
        seen = [(part.requires_grad, part.is_leaf, part is a) for part in (*results, *parts)]
        losses = [part.sum() for part in parts if part.requires_grad]
        if losses:
            sum(losses).backward()
        first = results[0]
        if first.requires_grad:
            (first * first).backward(torch.ones_like(first.detach()))
        return [*results, a.grad, first.grad, seen, results[0] is results[-1]]

    same(scenario, LEAVES[name], lambda: (torch.randn(3, requires_grad=True), torch.randn(3)))


def test_a_leaf_that_other_results_are_computed_from_is_refused():
    def f(a):
        made = Unit(a * 2, 1).requires_grad_()
        return made, made * made

    with pytest.raises(UnsupportedError, match="makes the leaf a Unit and computes further results from the leaf"):
        compiled(f)(torch.randn(3))


def test_eagers_error_for_any_kind():
    def f(w, x):
        hidden = (x @ w).relu()
        hidden.mul_(3)
        return hidden

    for call in (f, compiled(f)):
        result = call(*weight_and_input())
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            result.backward(ones(result))
