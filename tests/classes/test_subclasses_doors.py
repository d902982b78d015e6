"""Wrapper subclasses at the other doors, and subclasses of other kinds: they work, or are refused by name."""

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedError, UnsupportedTensorError

from .test_jagged import jagged
from .wrappers import Quantised, TwoTensor, described, quantised, two


def double(a):
    return a * 2


class Product(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return (x @ self.weight,)


@pytest.mark.parametrize("make", [lambda: two(3), lambda: jagged(0)], ids=["two", "jagged"])
def test_an_artifact_of_an_argument_is_refused(make):
    with pytest.raises(UnsupportedError, match="an artifact can't hold classes"):
        foregrad.export(double, (make(),))


def test_an_artifact_of_a_result_is_refused():
    with pytest.raises(UnsupportedError, match="an artifact can't hold classes"):
        foregrad.export(Product(two(3, 3)), (torch.ones(2, 3),))


class Taken(torch.autograd.Function):
    """The plain tensors of a wrapper, and a wrapper for a gradient."""

    @staticmethod
    def forward(ctx, wrapper):
        return wrapper.a.clone(), wrapper.b.clone()

    @staticmethod
    def backward(ctx, a, b):
        return TwoTensor(a.clone(), b.clone())


class Both(Product):
    def forward(self, x):
        return torch.cat(Taken.apply(x @ self.weight))


def test_an_artifact_holds_the_plain_tensors_of_a_parameter(tmp_path):
    module, x = Both(two(3, 3)), torch.randn(2, 3)
    foregrad.export(module, (x,)).save(tmp_path / "both")
    loaded = foregrad.load(tmp_path / "both")
    for call in (module, loaded):
        call(x).sin().sum().backward()
    assert torch.equal(loaded(x), module(x))
    parts = dict(loaded.named_parameters())
    assert parts.keys() == {"weight.a", "weight.b"} == loaded.state_dict().keys()
    assert torch.equal(parts["weight.a"].grad, module.weight.grad.a)
    assert torch.equal(parts["weight.b"].grad, module.weight.grad.b)


def test_an_artifact_of_a_quantised_weight(tmp_path):
    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", quantised(4, 3))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight)

    module, x = Linear(), torch.randn(2, 3, requires_grad=True)
    foregrad.export(module, (x,)).save(tmp_path / "linear")
    loaded = foregrad.load(tmp_path / "linear")
    results = [(result, *torch.autograd.grad(result.sum(), x)) for result in (module(x), loaded(x))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert {name: tensor.dtype for name, tensor in loaded.state_dict().items()} == {
        "weight.numbers": torch.int8,
        "weight.scale": torch.float32,
    }


def test_an_artifact_of_a_weight_whose_gradient_is_plain_is_refused():
    module = Product(quantised(3, 3, grad=True))
    with pytest.raises(UnsupportedError, match="inner tensors differ from its own"):
        foregrad.export(module, (torch.ones(2, 3),))
    module.weight.requires_grad_(False)
    foregrad.export(module, (torch.ones(2, 3),))


def graphs_noted(seen):
    def compiler(graph, inputs):
        seen.append(len(inputs))
        return graph.forward

    return compiler


@pytest.mark.parametrize("behind_dynamo", [False, True])
def test_without_guards(behind_dynamo):
    seen, module = [], Product(two(3, 3))

    def compiled(mod, inputs):
        return foregrad.aot_module_simplified(mod, inputs, graphs_noted(seen), graphs_noted(seen))

    first = torch.ones(2, 3), two(2, 3, grad=True)

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = module

        def forward(self, x, scale):
            return (self.inside(x)[0].sin() * scale,)

    scaled = Scaled()
    fast = torch.compile(scaled, backend=compiled) if behind_dynamo else compiled(scaled, first)
    for _ in range(2):
        x, scale = torch.randn(2, 3), two(2, 3, grad=True)
        found = []
        for call in (fast, scaled):
            (result,) = call(x, scale)
            found.append([described(t) for t in (result, *torch.autograd.grad(result.sum(), [module.weight, scale]))])
        assert found[0] == found[1]
    assert len(seen) == 2 and min(seen) >= 5  # two plain tensors for each wrapper


def test_functions_with_guards():
    a, module, x = two(3, grad=True), Product(two(3, 3)), torch.ones(2, 3)
    assert described(foregrad.aot_function(double, fw_compiler=foregrad.nop)(a)) == described(double(a))
    assert described(foregrad.aot_module(module, fw_compiler=foregrad.nop)(x)) == described(module(x))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.func.grad(lambda a: f(a).sum())(two(3, 3)),
        lambda f: torch.func.vmap(f)(two(3, 3)),
        lambda f: torch.func.grad(lambda x: f(x).sum())(torch.ones(3)),
    ],
    ids=["grad", "vmap", "grad_of_plain"],
)
def test_transforms(transformed):
    def seen(call):
        torch.manual_seed(0)
        return str(transformed(call))  # what vmap gives is around the wrapper

    assert seen(foregrad.compile(double, backend="eager", on_unsupported="raise")) == seen(double)


# ------------------------------------------------------------------- subclasses of other kinds


def test_a_subclass_of_parameter():
    class Weight(torch.nn.Parameter):
        pass

    linear = torch.nn.Linear(3, 3)
    linear.weight = Weight(linear.weight.detach())
    x = torch.ones(2, 3)
    assert described(foregrad.compile(linear, backend="eager", on_unsupported="raise")(x)) == described(linear(x))


def test_a_masked_tensor_runs_eagerly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.masked import masked_tensor

        a = masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
        with pytest.raises(UnsupportedTensorError, match="is a MaskedTensor"):
            foregrad.compile(double, backend="eager", on_unsupported="raise")(a)


class Rounded(torch.nn.Module):
    """A parametrization that gives a wrapper."""

    def forward(self, weight):
        scale = weight.detach().abs().amax(1, keepdim=True)
        return Quantised((weight.detach() / scale).round().to(torch.int8), scale)


class Halved(torch.nn.Module):
    def forward(self, weight):
        return weight * 0.5


def test_parametrizations():
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    for parametrization in (Rounded(), Halved()):
        linear = torch.nn.Linear(3, 3)
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", parametrization, unsafe=True)
        fast = foregrad.compile(linear, backend="eager", on_unsupported="raise")
        for _ in range(2):
            found = []
            for call in (fast, linear):
                linear.zero_grad()
                result = call(x)
                result.sum().backward()
                found.append((described(result), described([p.grad for p in linear.parameters()])))
            assert found[0] == found[1]
