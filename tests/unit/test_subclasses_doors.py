"""Wrapper subclasses at the other doors, and subclasses of other kinds: they work, or are refused by name."""

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedError, UnsupportedTensorError

from .test_jagged import jagged
from .wrappers import Quantised, described, two


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
    with pytest.raises(UnsupportedError, match="an artifact can't hold the classes"):
        foregrad.export(double, (make(),))


def test_an_artifact_of_a_parameter_is_refused():
    with pytest.raises(UnsupportedError, match="an artifact can't hold the classes"):
        foregrad.export(Product(two(3, 3)), (torch.ones(2, 3),))


def test_what_has_no_guards_is_refused():
    with pytest.raises(UnsupportedError, match="is given wrapper subclasses of tensors"):
        foregrad.aot_module_simplified(Product(two(3, 3)), (torch.ones(2, 3),), fw_compiler=foregrad.nop)


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


class Relabelled(torch.Tensor):
    """No data of its own: `__torch_function__` keeps the class."""


def test_a_class_without_data_of_its_own_runs_eagerly_and_is_kept():
    a = torch.ones(3).as_subclass(Relabelled)
    with pytest.raises(UnsupportedTensorError, match="is a Relabelled"):
        foregrad.compile(double, backend="eager", on_unsupported="raise")(a)
    with pytest.warns(ForegradWarning, match="is a Relabelled"):
        assert type(foregrad.compile(double, backend="eager", on_unsupported="eager")(a)) is Relabelled


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Int8WeightOnlyConfig", {}),
        ("Int8DynamicActivationInt8WeightConfig", {}),
        ("Int4WeightOnlyConfig", {}),
        ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
        ("Int8DynamicActivationIntxWeightConfig", {"weight_dtype": torch.int4}),
    ],
)
def test_weights_of_torchao(name, settings):
    """Packed numbers of four bits need a library for GPUs, and are skipped without; unpacked ones do not."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)).eval()
    try:
        quantization.quantize_(model, getattr(quantization, name)(**settings))
    except ImportError as error:
        pytest.skip(str(error))
    fast = foregrad.compile(model, backend="eager", on_unsupported="raise")
    for rows in (4, 5, 6):
        x = torch.randn(rows, 64)
        assert torch.equal(fast(x), model(x))
    assert len(fast.foregrad.specializations) <= 2
