"""Programs of the kind that PyTorch tests its own compilers with, by both doors."""

import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import ForegradWarning
from tests.dynamo.installed import make_known

_RAN = []
_LIBRARY = torch.library.Library("foregrad_world", "FRAGMENT")
_LIBRARY.define("noted(Tensor x) -> Tensor")


@torch.library.impl(_LIBRARY, "noted", "CPU")
def _noted(x):
    _RAN.append(x.tolist())
    return x.clone()


@torch.library.impl(_LIBRARY, "noted", "Meta")
def _(x):
    return torch.empty_like(x)


_register_effectful_op(torch.ops.foregrad_world.noted.default, _EffectType.ORDERED)


def by_dynamo(function, **options):
    make_known()
    torch._dynamo.reset()
    return torch.compile(function, backend="foregrad", options={"backend": "eager", **options})


def directly(function):
    return foregrad.compile(function, backend="eager")


doors = pytest.mark.parametrize("door", [directly, by_dynamo])


@doors
def test_an_operator_with_effects_runs_in_each_call_though_nobody_needs_its_result(door):
    def f(x):
        torch.ops.foregrad_world.noted(x)
        return x * 2

    compiled = door(f)
    _RAN.clear()
    for i in range(3):
        compiled(torch.full((2,), float(i)))
    assert _RAN == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@doors
def test_aten_print_prints_in_each_call(door, capfd):
    def f(x):
        torch.ops.aten._print("said")
        return x * 2

    compiled = door(f)
    for _ in range(3):
        compiled(torch.ones(2))
    assert capfd.readouterr().out.count("said") == 3


class Scaled(nn.Parameter):
    """It overrides torch functions, and has an attribute."""

    scale = 1.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_parameter_whose_class_overrides_torch_functions_behind_dynamo():
    layer = nn.Linear(3, 2)
    layer.weight = Scaled(torch.randn(2, 3))

    def gradients(function):
        found = []
        for i in range(3):
            layer.zero_grad()
            function(torch.full((2, 3), i + 1.0)).sum().backward()
            found.append(layer.weight.grad.clone())
        return found

    f = lambda x: layer(x).sin() * layer.weight.scale
    torch.testing.assert_close(gradients(by_dynamo(f)), gradients(f), rtol=0, atol=0)


@pytest.mark.parametrize("function", [torch.sigmoid, nn.functional.silu, nn.functional.mish])
def test_functions_with_a_sigmoid_are_fused_by_torchscript(function):
    x = torch.randn(4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = foregrad.memory_efficient_fusion(function)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, function(x))
    torch.testing.assert_close(gradient, torch.autograd.grad(function(x).sum(), x)[0])


def test_pytorchs_budget_is_ours_where_the_options_have_none():
    """`torch._functorch.config.activation_memory_budget` below 1 saves less for the backward."""
    make_known()
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))

    def saved(budget, **options):
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled = torch.compile(module, backend="foregrad", options={"backend": "eager", **options})
            return sum(tensor.numel() for tensor in compiled(torch.ones(64, 8)).grad_fn.saved_tensors)

    assert saved(0.0) < saved(1.0) == saved(0.0, partition="default")


def test_a_checkpointed_part_behind_dynamo_that_writes_to_buffers_runs_as_in_eager():
    """Its frame does: the graph hands the part buffers as arguments, which PyTorch then finds written to."""

    def steps(wrap):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        function = wrap(lambda x: checkpoint(module, x, use_reentrant=False).pow(2).sum())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            for i in range(2):
                function(torch.arange(12.0).view(4, 3) * (i + 1)).backward()
        return [p.grad for p in module.parameters()], list(module.buffers())

    found = steps(lambda function: by_dynamo(function, on_unsupported="eager"))
    torch.testing.assert_close(found, steps(lambda function: function), rtol=0, atol=0)
