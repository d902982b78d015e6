"""A module, or an object, may be given another class or another `__dict__` between calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from tests.covering import each


class Part(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = 3.0

    def forward(self, x):
        return x * self.factor * self.scale * self.weight + self.helper(x)

    def helper(self, x):
        return x


class OtherFactor(Part):
    factor = 5.0


class OtherForward(Part):
    def forward(self, x):
        return x * 100


class OtherHelper(Part):
    def helper(self, x):
        return x * 7


class Options:
    factor = 2.0

    def __init__(self):
        self.offset = 1.0

    def apply(self, x):
        return x * self.factor + self.offset


class OtherOptions(Options):
    factor = 9.0


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Part()
        self.parts = nn.ModuleList([Part(), Part()])
        self.options = Options()

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.options.apply(self.inner(x))


def a_class(cls):
    return lambda target: setattr(target, "__class__", cls)


def another_dict(**values):
    return lambda target: setattr(target, "__dict__", {**vars(target), **values})


def updated(**values):
    return lambda target: vars(target).update(values)


def tables_of(target):
    vars(target)["_parameters"] = {**target._parameters, "weight": nn.Parameter(torch.full((2,), 4.0))}


CHANGES = {
    "class": a_class(OtherFactor),
    "class, forward": a_class(OtherForward),
    "class, method": a_class(OtherHelper),
    "dict": another_dict(scale=8.0),
    "dict, forward": another_dict(forward=lambda x: x * 1000),
    "dict, the same": another_dict(),
    "update": updated(scale=8.0, training=False),
    "update, hiding a class's": updated(factor=8.0),
    "update, forward": updated(forward=lambda x: x * 1000),
    "update, method": updated(helper=lambda x: x * 1000),
    "table of parameters": tables_of,
    "there and back": lambda target: (a_class(OtherFactor)(target), a_class(Part)(target)),
}
OF_OPTIONS = {
    "class": a_class(OtherOptions),
    "dict": lambda target: setattr(target, "__dict__", {"offset": 6.0}),
    "update": updated(offset=6.0),
    "item": lambda target: vars(target).__setitem__("factor", 6.0),
}
TARGETS = {
    "itself": (Part, lambda module: module),
    "inner": (Whole, lambda module: module.inner),
    "in a list": (Whole, lambda module: module.parts[1]),
}


def outcomes(make, target, change, compile):
    torch.manual_seed(0)
    module = make()
    function = compile(module)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = []
    for step in range(4):
        if step in (1, 3):
            change(target(module))
        out = function(x)
        found += [out.tolist(), torch.autograd.grad(out.sum(), x, retain_graph=True)[0].tolist()]
    return found


COMPILED = {
    "module": lambda module: foregrad.compile(module, backend="eager"),
    "closure": lambda module: foregrad.compile(lambda x: module(x), backend="eager"),
}


@pytest.mark.parametrize(("name", "where", "how"), each(CHANGES, TARGETS, COMPILED, times=3))
def test_a_module(name, where, how):
    make, target = TARGETS[where]
    expected = outcomes(make, target, CHANGES[name], lambda module: module)
    assert outcomes(make, target, CHANGES[name], COMPILED[how]) == expected


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("name", OF_OPTIONS)
def test_an_object(name, how):
    def target(module):
        return module.options

    expected = outcomes(Whole, target, OF_OPTIONS[name], lambda module: module)
    assert outcomes(Whole, target, OF_OPTIONS[name], COMPILED[how]) == expected


def test_parametrizations_registered_later():
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    module = nn.Linear(2, 2)
    compiled = foregrad.compile(lambda x: module(x), backend="eager")
    x = torch.ones(1, 2)
    compiled(x)
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    assert torch.equal(compiled(x), module(x))
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(compiled(x), module(x))


def test_an_unchanged_module_is_compiled_once():
    module = Whole()
    compiled = foregrad.compile(module, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    assert len(compiled.foregrad.specializations) == 1
