"""Code that asks for the type of a tensor is told what eager tells it, in a capture too."""

from __future__ import annotations

import builtins
import functools

import pytest
import torch
from torch import nn

import foregrad
from tests.parity.oracle import check
from tests.programs import Table

program = PROGRAMS = Table()


@program
def identity(x, p):
    return x * 2 if type(x) is torch.Tensor else x * 3


@program
def of_a_result(x, p):
    return x * 2 if type(x + 1) is torch.Tensor else x * 3


@program
def equality(x, p):
    return x * 2 if type(x) == torch.Tensor else x * 3  # noqa: E721


@program
def parameter(x, p):
    return x * 2 if type(p) is nn.Parameter else x * 3


@program
def membership(x, p):
    return x * 2 if type(x) in (torch.Tensor, nn.Parameter) else x * 3


@program
def table(x, p):
    return {torch.Tensor: torch.sin, nn.Parameter: torch.cos}[type(x)](x)


@program
def of_classes(x, p):
    made = type("Made", (), {"factor": 4})
    asked = type(made) is type, type(int) is type, type(type) is type, isinstance(made, type), type(made()) is made
    return x * made.factor if all(asked) and type(x) is torch.Tensor else x * 3


@program
def text_of_type(x, p):
    said = type.__name__ == "type", repr(type) == "<class 'type'>", str(type | None) == "type | None"
    return x * 2 if all(said) and str(type[int]) == "type[int]" and type(x) is torch.Tensor else x * 3


@program
def attribute(x, p):
    return x * 2 if x.__class__ is torch.Tensor else x * 3


@program
def name(x, p):
    return x * len(type(x).__name__), x * len(x.__class__.__name__)


@program
def of_plain_objects(x, p):
    assert type(p.ndim) is int
    assert isinstance(int, type)
    assert isinstance(x, torch.Tensor)
    assert not isinstance(3, type)
    assert issubclass(type, type)
    return x * 2


@program
def a_class_made(x, p):
    made = type("Made", (), {"factor": 3})
    return x * made.factor, x * isinstance(made(), made)


@program
def in_a_nested_function(x, p):
    def inner(v):
        return type(v) is torch.Tensor

    return x * 2 if all(map(inner, [x, x * 2])) else x * 3


@functools.singledispatch
def doubled(x):
    raise TypeError(type(x))


@doubled.register
def _(x: torch.Tensor):
    return x * 2


@program
def dispatched(x, p):
    return doubled(x), doubled(x.sin())


@program
def matched(x, p):
    match x:
        case torch.Tensor():
            return x * 2
        case _:
            return x * 3


def args():
    return torch.randn(3, requires_grad=True), nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("name", PROGRAMS)
def test_types_are_eagers(name):
    check(PROGRAMS[name], args)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.helper(x * 1) * (2 if type(self.weight) is nn.Parameter else 5)

    def helper(self, x):
        return x * 3 if type(x) is torch.Tensor else x * 7


def test_methods_of_modules_inside():
    check(nn.Sequential(Inner(), nn.ReLU(), Inner()), lambda: (torch.randn(3),))


def test_nothing_stays_after_a_capture():
    compiled = foregrad.compile(PROGRAMS["attribute"], backend="eager")
    compiled(*args())
    foregrad.compile(PROGRAMS["identity"], backend="eager")(*args())
    assert "type" not in globals()
    assert type is builtins.type
    assert "__class__" not in vars(torch._subclasses.FakeTensor)


def test_nothing_stays_where_the_function_raises():
    def failing(x):
        assert type(x) is torch.Tensor
        raise KeyError(x.__class__)

    with pytest.raises(KeyError):
        foregrad.compile(failing, backend="eager")(torch.ones(2))
    assert "type" not in globals()
    assert "__class__" not in vars(torch._subclasses.FakeTensor)


class Holds(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        held = self.held.values() if isinstance(self.held, dict) else self.held
        for function in held if isinstance(held, (list, tuple, type({}.values()))) else (held,):
            x = function(x)
        return x


@pytest.mark.parametrize("how", ["itself", "in a list", "in a tuple", "in a dict", "partial", "in a submodule"])
def test_functions_of_another_file_that_a_module_holds(how):
    elsewhere = {"__name__": "elsewhere", "torch": torch}
    exec("def ask(x): return x * 2 if type(x) is torch.Tensor else x * 3", elsewhere)
    ask = elsewhere["ask"]
    held = {
        "itself": ask,
        "in a list": [torch.sin, ask],
        "in a tuple": (ask, ask),
        "in a dict": {"ask": ask},
        "partial": functools.partial(ask),
        "in a submodule": None,
    }[how]
    module = Holds(Holds(ask)) if held is None else Holds(held)
    x = torch.rand(3)
    assert torch.equal(foregrad.compile(module, backend="eager")(x), module(x))
    assert "type" not in elsewhere
