"""Recurrent layers, which keep a list of their weights: given others by `functional_call`, exchanged, by every door."""

import copy

import pytest
import torch
from torch.func import functional_call, grad

import foregrad
from tests.covering import each
from tests.dynamo.installed import make_known

LAYERS = [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN]


def compiled(function, door):
    if door == "compile":
        return foregrad.compile(function, backend="eager", on_unsupported="raise")
    if door == "aot_function":
        return foregrad.aot_function(function, foregrad.nop)
    make_known()
    torch._dynamo.reset()
    return torch.compile(function, backend="foregrad", options={"backend": "eager", "on_unsupported": "raise"})


DOORS = ["compile", "aot_function", "torch.compile"]


def given(layer):
    return {name: torch.randn_like(p, requires_grad=True) for name, p in layer.named_parameters()}


def check(eager, ours):
    eager, ours = torch.utils._pytree.tree_leaves(eager), torch.utils._pytree.tree_leaves(ours)
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.parametrize(("cls", "door"), each(LAYERS, DOORS, times=2))
def test_parameters_are_given_by_functional_call(cls, door):
    """Each call is given others; the layer goes on with its own after it."""
    layer, x = cls(3, 4, 2, batch_first=True, bidirectional=True), torch.randn(2, 5, 3)

    def call(parameters, x):
        return functional_call(layer, parameters, (x,))

    ours = compiled(call, door)
    expected = layer(x)
    for _ in range(3):
        parameters = given(layer)
        sides = []
        for function in (ours, call):
            out = function(parameters, x)
            sides.append((out, torch.autograd.grad(out[0].square().sum(), list(parameters.values()))))
            check(expected, layer(x))
        check(sides[1], sides[0])
    if door != "torch.compile":
        assert len(foregrad.explain_recompiles(ours)) == 1


@pytest.mark.parametrize(("cls", "door"), each(LAYERS, DOORS, times=2))
def test_gradients_by_transforms_of_parameters_that_are_given(cls, door):
    layer, x = cls(3, 4), torch.randn(5, 2, 3)

    def loss(parameters):
        return functional_call(layer, parameters, (x,))[0].square().sum()

    ours = compiled(grad(loss), door)
    for _ in range(2):
        parameters = given(layer)
        check(grad(loss)(parameters), ours(parameters))


@pytest.mark.parametrize("cls", LAYERS)
def test_a_parameter_is_exchanged_between_calls_and_inside(cls):
    def exchange(layer):
        layer.weight_hh_l0 = torch.nn.Parameter(torch.full_like(layer.weight_hh_l0, 0.5))

    def inside(layer, x):
        before = layer(x)[0]
        exchange(layer)
        return before, layer(x)[0]

    eager, x = cls(3, 4), torch.randn(5, 2, 3)
    ours = copy.deepcopy(eager)
    call = compiled(ours, "compile")
    for _ in range(2):
        check(eager(x)[0], call(x)[0])
        exchange(eager)
        exchange(ours)
        check(eager(x)[0], ours(x)[0])
    both = foregrad.compile(inside, backend="eager", on_unsupported="raise")
    with torch.no_grad():
        for _ in range(2):
            check(inside(eager, x), both(ours, x))
            check(eager(x)[0], ours(x)[0])


def test_a_layer_that_eager_gave_other_parameters_stays_compiled():
    layer, x = torch.nn.GRU(3, 4), torch.randn(5, 2, 3)
    call = compiled(layer, "compile")
    for _ in range(4):
        functional_call(layer, given(layer), (x,))
        check(copy.deepcopy(layer)(x), call(x))
    assert len(foregrad.explain_recompiles(call)) == 1
