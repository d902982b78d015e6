"""Code that ran is what guards come from: wherever it was called from, what it reads is guarded, and nothing else."""

import collections
import functools

import pytest
import torch

import foregrad

pytestmark = pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")  # some of these run eagerly

SCALE = 2.0
UNUSED = 1.0


class Config:
    factor = 2.0


CONFIG = Config()


def scale():
    return SCALE


def factor():
    return CONFIG.factor


def body(x):
    return x * SCALE * CONFIG.factor


def never(x):
    return x * UNUSED


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * scale()

    @staticmethod
    def backward(ctx, tangent):
        return tangent * scale() * factor()


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * scale() * factor() if func is torch.sin else result


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * scale() * factor() if func is torch.ops.aten.sin.default else result


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) * scale() * factor() if func is torch.sin else result


class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


class Parametrization(torch.nn.Module):
    def forward(self, weight):
        return weight * scale() * factor()


def with_hook(register):
    module = Product()
    register(module)
    return lambda x: module(x)


def of_a_tensor_hook(x):
    y = x * 1.0
    y.register_hook(lambda gradient: gradient * scale() * factor())
    return y


def inside_a_function_mode(x):
    with FunctionMode():
        return torch.sin(x)


def inside_a_dispatch_mode(x):
    with DispatchMode():
        return torch.sin(x)


def packing(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * scale() * factor(), lambda t: t):
        return x.sin() * x


def of_a_gradient_inside(x):
    y = x.detach().requires_grad_()
    z = y * 1.0
    z.register_hook(lambda gradient: gradient * scale() * factor())
    z.sum().backward()
    return x * y.grad


PROGRAMS = {
    "a branch": lambda x: torch.cond(x.sum() > -1e9, body, lambda y: y * factor(), (x,)),
    "vmap": lambda x: torch.vmap(body)(x),
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False),
    "a custom Function": Scaled.apply,
    "a hook of a tensor": of_a_tensor_hook,
    "a key for sorting": lambda x: x * sorted([3.0, 1.0], key=lambda v: v * scale())[1] * scale() * factor(),
    "reduce": lambda x: functools.reduce(lambda a, b: a * b * scale() * factor(), [x, x]),
    "a generator": lambda x: sum(x * scale() * factor() for _ in range(2)),
    "a function mode": inside_a_function_mode,
    "a dispatch mode": inside_a_dispatch_mode,
    "a subclass": lambda x: torch.sin(x.as_subclass(Subclass)).as_subclass(torch.Tensor),
    "a forward hook": with_hook(lambda m: m.register_forward_hook(lambda m, i, o: o * scale() * factor())),
    "a pre-hook": with_hook(lambda m: m.register_forward_pre_hook(lambda m, i: (i[0] * scale() * factor(),))),
    "a parametrization": with_hook(
        lambda m: torch.nn.utils.parametrize.register_parametrization(m, "weight", Parametrization())
    ),
    "saved tensors": packing,
    "a gradient inside": of_a_gradient_inside,
}


def results_of(function):
    x = torch.linspace(0.1, 0.9, 3).requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("what", ["SCALE", "factor"])
@pytest.mark.parametrize("called_by", PROGRAMS)
def test_what_runs_is_guarded(monkeypatch, called_by, what):
    function = PROGRAMS[called_by]
    compiled = foregrad.compile(function, backend="eager")
    results_of(compiled)
    monkeypatch.setattr(*((CONFIG, "factor") if what == "factor" else (__name__ + "." + what,)), 5.0)
    torch._dynamo.reset()  # which eager's `cond` calls: PyTorch 2.15's fails on a float that it has seen change
    for ours, eagers in zip(results_of(compiled), results_of(function), strict=True):
        assert torch.equal(ours, eagers)


def test_what_does_not_run_is_not(monkeypatch):
    module = Product()
    module.other = never
    module.register_forward_hook(lambda m, i, o: o if i else m.other(o))
    compiled = foregrad.compile(lambda x: module(x), backend="eager")
    results_of(compiled)
    monkeypatch.setattr(__name__ + ".UNUSED", 5.0)
    results_of(compiled)
    assert len(compiled.foregrad.compilations) == 1


def test_attributes_of_the_class_of_a_tuple_are_guarded():
    """An attribute that is read through an instance is its class's, a named tuple's too."""

    class Pair(tuple):  # noqa: SLOT001
        scale = 2.0

    named = collections.namedtuple("named", "first")
    named.scale = 2.0
    for cls, value in ((Pair, Pair((1.0, 2.0))), (named, named(1.0))):

        def function(x, value=value):
            return x * value.scale + value[0]

        compiled = foregrad.compile(function, backend="eager")
        assert torch.equal(compiled(torch.ones(2)), function(torch.ones(2)))
        cls.scale = 5.0
        assert torch.equal(compiled(torch.ones(2)), function(torch.ones(2)))
