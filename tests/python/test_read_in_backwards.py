"""An object that a caller may change before the backward is read when the backward runs, as in eager."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError


@dataclasses.dataclass
class Config:
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class ByAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, config):
        ctx.config = config
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.config.scale, None


class ByItem(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, config):
        ctx.config = config
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.config[0], None


class Called:
    def __init__(self, config):
        self.config = config

    def __call__(self, gradient):
        return gradient * self.config.scale


def with_hook(x, hook):
    y = x * 2
    y.register_hook(hook)
    return y.sum()


def scaled(config, gradient):
    return gradient * config.scale


def scaled_by_default(x, config):
    def hook(gradient, config=config):
        return gradient * config.scale

    return with_hook(x, hook)


def on_a_node(x, config):
    y = x * 2
    y.grad_fn.register_hook(lambda inputs, _: (inputs[0] * config.scale, *inputs[1:]))
    return y.sum()


def of_a_class_inside(x, config):
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * config.scale

    return Inside.apply(x).sum()


READERS = {
    "hook": lambda x, config: with_hook(x, lambda gradient: gradient * config.scale),
    "hook with a default": scaled_by_default,
    "partial": lambda x, config: with_hook(x, functools.partial(scaled, config)),
    "hook on a node": on_a_node,
    "context": lambda x, config: ByAttribute.apply(x, config).sum(),
    "class inside": of_a_class_inside,
}


def or_eager(function):
    return foregrad.compile(function, backend="eager", on_unsupported="eager")


def gradients(function, *args, config, change):
    found = []
    for scale in (3.0, 5.0):
        x = torch.ones(2, requires_grad=True)
        change(config, 2.0)
        loss = function(x, *args)
        change(config, scale)
        loss.backward()
        found.append(x.grad)
    return found


def set_scale(config, scale):
    config.scale = scale


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_an_argument_is_read_by_the_backward(reader):
    config = Config(2.0)
    compiled = gradients(or_eager(reader), config, config=config, change=set_scale)
    assert all(map(torch.equal, compiled, gradients(reader, config, config=config, change=set_scale)))


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_closed_over_object_is_read_by_the_backward(reader):
    config = Config(2.0)
    closed = lambda x: reader(x, config)
    compiled = gradients(or_eager(closed), config=config, change=set_scale)
    assert all(map(torch.equal, compiled, gradients(closed, config=config, change=set_scale)))


@pytest.mark.parametrize("make", [list, tuple], ids=["list", "list in a tuple"])
@pytest.mark.parametrize("hooked", [True, False], ids=["hook", "context"])
def test_an_object_that_the_call_gives_back(make, hooked):
    def function(x):
        config = [2.0]
        held = (config, 1.0) if make is tuple else config
        if not hooked:
            return ByItem.apply(x, config).sum(), held
        return with_hook(x, lambda gradient: gradient * config[0]), held

    def run(function):
        x = torch.ones(2, requires_grad=True)
        loss, held = function(x)
        (held[0] if make is tuple else held)[0] = 3.0
        loss.backward()
        return x.grad

    with pytest.warns(ForegradWarning, match="reads Python state that may change|an object that the call gives back"):
        found = run(or_eager(function))
    assert torch.equal(found, run(function))


def test_what_nobody_can_change_is_compiled():
    def function(x, config, frozen):
        scale, own = config.scale, [config.scale]
        loss = ByAttribute.apply(x, frozen).sum() + with_hook(x, lambda gradient: gradient * scale)
        return loss + with_hook(x, lambda gradient: gradient * own[0])

    x = torch.ones(2, requires_grad=True)
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    (found,) = torch.autograd.grad(compiled(x, Config(2.0), Frozen(3.0)), x)
    assert torch.equal(found, torch.autograd.grad(function(x, Config(2.0), Frozen(3.0)), x)[0])


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
def test_an_object_that_is_a_hook():
    config = Config(2.0)
    hook = Called(config)
    for function, args in ((with_hook, (hook,)), (lambda x: with_hook(x, hook), ())):
        compiled = gradients(or_eager(function), *args, config=config, change=set_scale)
        assert all(map(torch.equal, compiled, gradients(function, *args, config=config, change=set_scale)))


def test_the_error_says_what_to_do():
    compiled = foregrad.compile(READERS["context"], backend="eager", on_unsupported="raise")
    with pytest.raises(UnsupportedSideEffectError, match="Pass the values to the Function"):
        compiled(torch.ones(2, requires_grad=True), Config(2.0))
