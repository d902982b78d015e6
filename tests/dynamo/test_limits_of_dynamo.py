"""Rows of docs/limits.md on what Dynamo does not guard: silent, as with PyTorch's own backends, until it does."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
from torch import nn

import foregrad

BACKENDS = {"foregrad": {"options": {"backend": "eager"}}, "aot_eager": {}}
PAGE = pathlib.Path(__file__).parents[2].joinpath("docs/limits.md").read_text().partition("## Behind Dynamo")[2]


@pytest.fixture(params=BACKENDS)
def compile_(request):
    return lambda function: torch.compile(function, backend=request.param, **BACKENDS[request.param])


def put_forward(layer, log):
    layer.register_forward_hook(lambda module, args, y: (log.append(1), y * 2)[1])


def put_forward_pre(layer, log):
    layer.register_forward_pre_hook(lambda module, args: (log.append(1), (args[0] * 2,))[1])


def put_backward(layer, log):
    layer.register_full_backward_hook(lambda module, given, came: (log.append(1), (given[0] * 2,))[1])


def put_backward_pre(layer, log):
    layer.register_full_backward_pre_hook(lambda module, came: (log.append(1), (came[0] * 2,))[1])


def with_hook(compile_, put, *, later):
    model, log, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [], torch.ones(1, 2, requires_grad=True)
    nn.init.constant_(model[0].weight, 0.3)
    nn.init.zeros_(model[0].bias)
    compiled = compile_(model)
    if later:
        compiled(x).sum().backward()
        x.grad = None
    put(model[0], log)
    y = compiled(x)
    y.sum().backward()
    return y.tolist(), x.grad.tolist(), len(log)


PUTS = [put_forward, put_forward_pre, put_backward, put_backward_pre]


@pytest.mark.parametrize("put", PUTS)
def test_a_hook_that_is_put_on_a_module_later(compile_, put):
    assert "| puts a hook on a module (" in PAGE
    expected = with_hook(lambda model: model, put, later=True)
    assert with_hook(compile_, put, later=False) == expected
    torch._dynamo.reset()
    assert with_hook(compile_, put, later=True) != expected
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        assert with_hook(compile_, put, later=True) == expected


def test_a_hook_that_is_taken_off_later_is_noticed(compile_):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    handle = layer.register_forward_hook(lambda module, args, y: y * 2)
    compiled = compile_(layer)
    assert torch.equal(compiled(x), layer(x))
    handle.remove()
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("put", PUTS[:2])  # others run eagerly, by name
def test_foregrad_compile_notices_such_a_hook(put):
    expected = with_hook(lambda model: model, put, later=True)
    assert with_hook(lambda model: foregrad.compile(model, backend="eager"), put, later=True) == expected


KEY, OTHER, LAYER = torch.ones(2), torch.full((2,), 2.0), nn.Linear(2, 2)
TABLE, TENSORS, WEIGHTS = {KEY: 3.0}, {KEY}, {LAYER.weight: 2.0}
NOT_ASKED = {
    "is": lambda x: x * 2 if x is KEY else x * 3,
    "hash": lambda x: x * 2 if hash(x) == hash(KEY) else x * 3,
    "a key": lambda x: x * TABLE.get(x, 1.0),
}
AS_IN_EAGER = {
    "a member of a set": lambda x: x * 2 if x in TENSORS else x * 3,
    "id": lambda x: x * 2 if id(x) == id(KEY) else x * 3,
    "a parameter as a key": lambda x: x * WEIGHTS[LAYER.weight],
    "a key of its own": lambda x: x * {x: 2.0}[x],
}


def calls(compile_, function, order):
    torch._dynamo.reset()
    compiled = compile_(function)
    return [compiled(x).tolist() for x in order]


@pytest.mark.parametrize("name", NOT_ASKED)
def test_another_tensor_is_taken_for_the_first(compile_, name):
    assert "| asks which tensor an argument is, by `is`, `hash()`, or as a key" in PAGE
    function, order = NOT_ASKED[name], (KEY, OTHER)
    both = [[function(x).tolist() for x in row] == calls(compile_, function, row) for row in (order, order[::-1])]
    assert not all(both)
    assert all(calls(compile_, function, [x]) == [function(x).tolist()] for x in order)


@pytest.mark.parametrize("name", AS_IN_EAGER)
def test_what_tells_tensors_apart_as_in_eager(compile_, name):
    function = AS_IN_EAGER[name]
    for order in ([KEY, OTHER, KEY], [OTHER, KEY, OTHER]):
        assert calls(compile_, function, order) == [function(x).tolist() for x in order]


class Masked(nn.Module):
    def __init__(self, asked):
        super().__init__()
        self.asked, self.mask = asked, KEY

    def forward(self, x):
        return x * self.asked(self.mask)


BY_ATTRIBUTE = {
    "is": (lambda mask: 2.0 if mask is KEY else 3.0, False),
    "hash": (lambda mask: 2.0 if hash(mask) == hash(KEY) else 3.0, False),
    "id": (lambda mask: 2.0 if id(mask) == id(KEY) else 3.0, True),
    "a key": (lambda mask: {KEY: 2.0, OTHER: 3.0}[mask], False),
}


@pytest.mark.parametrize("name", BY_ATTRIBUTE)
def test_an_attribute_that_is_replaced_by_a_different_tensor(compile_, name):
    assert "| asks which tensor an attribute of a module is, by `is`, `hash()`, or as a key" in PAGE
    asked, as_in_eager = BY_ATTRIBUTE[name]
    torch._dynamo.reset()
    module = Masked(asked)
    compiled = compile_(module)
    compiled(torch.ones(1))
    module.mask = OTHER
    assert torch.equal(compiled(torch.ones(1)), module(torch.ones(1))) is as_in_eager


def later_method(compile_):
    class Rate:
        def value(self):
            return 2.0

    rate = Rate()
    compiled = compile_(lambda x: x * rate.value())
    compiled(torch.ones(1))
    Rate.value = lambda self: 3.0
    return compiled(torch.ones(1)).item()


def test_a_method_that_is_replaced_later(compile_):
    assert "| adds a method to a class, or replaces a method, after the first call" in PAGE
    torch._dynamo.reset()
    assert later_method(compile_) == 2.0
    assert later_method(lambda function: foregrad.compile(function, backend="eager")) == 3.0


def test_an_array_over_a_written_tensor_is_read_after_the_write():
    array = np.zeros(2, dtype=np.float32)
    written = torch.from_numpy(array)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: (x.add_(1), torch.as_tensor(array) * 1)[1], backend="foregrad", options={"backend": "eager"}
    )
    assert [compiled(written).tolist() for _ in range(2)] == [[1.0, 1.0], [2.0, 2.0]]
