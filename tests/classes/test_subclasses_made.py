"""Wrapper subclasses that a function makes itself, of tensors that it reaches."""

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import foregrad

from .wrappers import described


class Held(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program
        self.first, self.second = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
        self.plain = torch.ones(3, 3)

    def forward(self, x):
        return self.program(self, x)


def _gradient(module, x):
    weight = TwoTensor(module.first.detach(), module.second.detach()).requires_grad_()
    return torch.autograd.grad((x @ weight).sum(), weight)[0]


PROGRAMS = {
    "of_parameters": lambda m, x: x @ TwoTensor(m.first, m.second),
    "of_detached": lambda m, x: x @ TwoTensor(m.first.detach(), m.second.detach()),
    "of_one_and_one_made": lambda m, x: x @ TwoTensor(m.plain, x * 2),
    "written": lambda m, x: x @ TwoTensor(m.plain, m.plain * 2).add_(1),
    "given_back": lambda m, x: (TwoTensor(m.plain, m.plain), TwoTensor(x, x)),
    "differentiated": _gradient,
    "parameter": lambda m, x: nn.Parameter(TwoTensor(m.first.detach(), m.second.detach())) * 2,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wrapper_made_of_tensors_that_the_function_reaches(name, recwarn):
    ours = Held(PROGRAMS[name])
    eager = copy.deepcopy(ours)
    fast = foregrad.compile(ours, backend="eager", on_unsupported="raise")
    for _ in range(3):
        x = torch.randn(3, 3)
        expected, found = eager(x), fast(x)
        results = [r if isinstance(r, tuple) else (r,) for r in (expected, found)]
        assert list(map(described, results[1])) == list(map(described, results[0]))
        if name == "given_back":
            assert found[0].a is found[0].b is ours.plain and found[1].a is x
        for module in (eager, ours):
            with torch.no_grad():
                module.first.add_(1)
                module.second = nn.Parameter(module.second * 2)
                module.plain = module.plain + 1
    assert not [w for w in recwarn if issubclass(w.category, foregrad.errors.ForegradWarning)]


class Rebuilt(nn.Module):
    def forward(self, first, second):
        return TwoTensor.__tensor_unflatten__({"a": first, "b": second}, None, first.shape, first.stride())

    def right_inverse(self, weight):
        return weight.a, weight.b


def test_a_weight_that_is_parametrised_by_its_plain_tensors(recwarn):
    ours = nn.Linear(3, 3, bias=False)
    ours.weight = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)), requires_grad=False)
    nn.utils.parametrize.register_parametrization(ours, "weight", Rebuilt(), unsafe=True)
    fast = foregrad.compile(ours, backend="eager", on_unsupported="raise")
    for _ in range(3):
        x = torch.randn(2, 3)
        assert described(fast(x)) == described(ours(x))
        with torch.no_grad():
            ours.parametrizations.weight.original0.mul_(2)
    assert not [w for w in recwarn if issubclass(w.category, foregrad.errors.ForegradWarning)]


class Marked(torch.Tensor):
    """Dynamo is told to leave its constructor and a helper of its operators alone. It looks for what it may not have."""

    @staticmethod
    @torch._dynamo.disable
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @torch._dynamo.disable
    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return [*(["other"] if hasattr(self, "other") else []), "inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Marked(inner["inner"])

    @staticmethod
    @torch.compiler.disable
    def run(func, args, kwargs):
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map_only(Marked, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Marked, cls.run(func, *plain))


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Marked(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.inner


def test_what_a_class_tells_dynamo_to_leave_alone_is_a_part_of_its_operators():
    def f(weight, x):
        return (weight * x).sin().sum() + Wrap.apply(x).cos().sum()

    weight, x = Marked(torch.randn(3)).requires_grad_(), torch.randn(3)
    fast = foregrad.compile(f, backend="eager", on_unsupported="raise")
    for _ in range(2):
        given = [(loss, *torch.autograd.grad(loss, weight)) for loss in (f(weight, x), fast(weight, x))]
        assert all(type(tensor) is Marked for tensor in given[1])
        assert all(torch.equal(a.inner, b.inner) for a, b in zip(*given, strict=True))


def test_a_class_that_looks_for_what_its_tensors_may_not_have():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(Marked(torch.randn(3)))

        def forward(self, x):
            return x * self.weight

    ours, x = Scaled(), torch.randn(3)
    fast = foregrad.compile(ours, backend="eager", on_unsupported="raise")
    assert all(torch.equal(fast(x).inner, ours(x).inner) for _ in range(2))
