"""`x.data = y` behind Dynamo, which writes it as `set_` and takes the version counter back, is what it is in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.parity.data_programs import EAGER, MODULES, PROGRAMS, module_of, source_of
from tests.parity.oracle import check
from tests.parity.programs import load

# Dynamo looks at `.grad` of tensors between two graphs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

HOW = {"grad_slack": 32, "grad_strides": False}
OPTIONS = {"backend": "eager", "on_unsupported": "raise"}


def compiled(function):
    return torch.compile(function, backend="foregrad", options=OPTIONS)


COMPILED = [name for name in PROGRAMS if ".data = " in PROGRAMS[name][2] and name not in EAGER]


@pytest.mark.parametrize("name", COMPILED[::3])
def test_data_of_arguments(name):
    f, make_args = load(source_of(name))
    assert check(f, make_args, compile=compiled, **HOW) == "equal"


@pytest.mark.parametrize("name", ["use ema data", "swap", "buffer new", "sam"])
def test_data_of_modules(name):
    assert name in MODULES
    module = module_of(name)
    assert check(module, lambda: (torch.randn(2, 3, requires_grad=True),), compile=compiled, **HOW) == "equal"


def _begins_later(b):
    def f(x):
        v = b[:] * 1
        b.data = torch.cat([x, v]).detach()[2:]
        return v

    return f


def _began_later(b):
    def f(x):
        v = b.view(-1) * 1
        b.data = x * 1
        return v

    return f


@pytest.mark.parametrize("make", [_begins_later, _began_later])
def test_a_parameter_that_begins_elsewhere_in_its_new_memory(make):
    """Views that a graph takes of an input by strides are right wherever it begins, which Dynamo does not guard."""
    sides = []
    for how in (lambda f: f, compiled):
        b = nn.Parameter(torch.arange(6.0)[4:])
        call = how(make(b))
        sides.append([])
        for number in range(4):
            out = call(torch.full((2,), number + 10.0))
            out.sum().backward()
            sides[-1].append((out.tolist(), b.tolist(), b.storage_offset(), b.grad.tolist()))
    assert sides[0] == sides[1]


def test_parameters_that_are_parts_of_one_vector():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    twin = copy.deepcopy(model)

    def step(module, x):
        vector = nn.utils.parameters_to_vector(module.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, module.parameters())
        return module(x)

    call = compiled(step)
    for _ in range(4):
        x = torch.randn(3, 2)
        assert torch.equal(call(twin, x), step(model, x))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.storage_offset() == q.storage_offset()
