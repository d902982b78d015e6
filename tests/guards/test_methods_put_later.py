"""A method that a class inherited is put on the class itself later: calls after that see it, as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad


def step(function):
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    y = function(x)
    y.sum().backward()
    return [y.detach(), x.grad]


def check(function, change, put_back):
    def run(function):
        found = step(function)
        change()
        try:
            return [*found, *step(function)]
        finally:
            put_back()

    found, expected = run(foregrad.compile(function, backend="eager", on_unsupported="raise")), run(function)
    assert not torch.equal(expected[1], expected[3]) or not torch.equal(expected[0], expected[2])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def put(cls, name, item):
    return lambda: setattr(cls, name, item), lambda: delattr(cls, name)


def sets_seven(ctx, inputs, output):
    ctx.factor = 7


FUNCTIONS = {
    "forward": staticmethod(lambda x: x * 10),
    "backward": staticmethod(lambda ctx, gradient: gradient * 10),
    "vjp": staticmethod(lambda ctx, gradient: gradient * 10),
    "setup_context": staticmethod(sets_seven),
    "apply": classmethod(lambda cls, x: x * 7),
}


@pytest.mark.parametrize("place", ["class", "class between"])
@pytest.mark.parametrize("method", FUNCTIONS)
def test_a_custom_function_gets_a_method_of_its_own(method, place):
    class Base(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = 2

    if method != "vjp":
        Base.backward = staticmethod(lambda ctx, gradient: gradient * ctx.factor)
    else:
        Base.vjp = staticmethod(lambda ctx, gradient: gradient * ctx.factor)

    class Between(Base):
        pass

    class Own(Between):
        pass

    check(lambda x: Own.apply(x), *put(Own if place == "class" else Between, method, FUNCTIONS[method]))


def entered(x, value):
    with value as factor:
        return x * factor


def ends(self, *_):
    return None


# What it inherits, how the method is called, what it gets.
OBJECTS = {
    "__call__": (lambda self, x: x * 2, lambda x, o: o(x), lambda self, x: x * 9),
    "method": (lambda self, x: x * 2, lambda x, o: o.method(x), lambda self, x: x * 9),
    "__getattr__": (lambda self, name: 2.0, lambda x, o: x * o.absent, lambda self, name: 9.0),
    "__getitem__": (lambda self, key: 2.0, lambda x, o: x * o[0], lambda self, key: 9.0),
    "__len__": (lambda self: 2, lambda x, o: x * len(o), lambda self: 9),
    "__bool__": (None, lambda x, o: x * (2 if o else 9), lambda self: False),
    "__iter__": (lambda self: iter([2.0]), lambda x, o: x * sum(o), lambda self: iter([9.0])),
    "__enter__": (lambda self: 2.0, entered, lambda self: 9.0),
    "__rmul__": (lambda self, x: x * 2, lambda x, o: x * o, lambda self, x: x * 9),
    "__eq__": (None, lambda x, o: x * (2 if o == 1 else 9), lambda self, other: True),
    "__torch_function__": (
        classmethod(lambda cls, function, types, args=(), kwargs=None: args[0] * 2),
        lambda x, o: torch.add(x, o),
        classmethod(lambda cls, function, types, args=(), kwargs=None: args[0] * 9),
    ),
}


@pytest.mark.parametrize("base", [object, nn.Module])
@pytest.mark.parametrize("method", OBJECTS)
def test_an_object_or_a_module_gets_a_method_of_its_own(method, base):
    inherited, use, item = OBJECTS[method]
    held = {"__exit__": ends} if inherited is None else {"__exit__": ends, method: inherited}
    own = type("Own", (type("Base", (base,), held),), {})
    value = own()
    check(lambda x: use(x, value), *put(own, method, item))


@pytest.mark.parametrize("base", [object, nn.Module])
@pytest.mark.parametrize("method", [name for name in OBJECTS if OBJECTS[name][0] is not None])
def test_the_method_that_is_inherited_is_replaced(method, base):
    inherited, use, item = OBJECTS[method]
    parent = type("Base", (base,), {"__exit__": ends, method: inherited})
    value = type("Own", (parent,), {})()
    check(lambda x: use(x, value), lambda: setattr(parent, method, item), lambda: setattr(parent, method, inherited))


def test_a_module_gets_its_own_call():
    class Base(nn.Module):
        def forward(self, x):
            return x * 2

    own = type("Own", (Base,), {})
    module = own()
    check(lambda x: module(x), *put(own, "__call__", lambda self, x: x * 9))


CONTAINERS = {
    "__missing__": (dict, lambda x, o: x * o["absent"], lambda self, key: 9.0),
    "__getitem__": (dict, lambda x, o: x * o["there"], lambda self, key: 9.0),
    "__contains__": (dict, lambda x, o: x * (2 if "there" in o else 9), lambda self, key: False),
    "__len__": (list, lambda x, o: x * len(o), lambda self: 9),
    "__iter__": (list, lambda x, o: x * sum([*o]), lambda self: iter([9])),
}


@pytest.mark.parametrize("method", CONTAINERS)
def test_a_container_gets_a_method_of_its_own(method):
    kind, use, item = CONTAINERS[method]
    held = {"__missing__": lambda self, key: 2.0} if kind is dict else {}
    own = type("Own", (type("Base", (kind,), held),), {})
    value = own({"there": 2.0} if kind is dict else [1, 2])
    check(lambda x: use(x, value), *put(own, method, item))


class Scaled(nn.Module):
    scale = 2.0

    def method(self, x):
        return x * 2

    def forward(self, x):
        return x * 2


class Calling(type("Between", (Scaled,), {})):
    def forward(self, x):
        return super().forward(x)

    def other(self, x):
        return super().method(x) * super().scale


PAST_THE_MODULE = {
    "forward": (lambda x, o: o(x), lambda self, x: x * 9),
    "method": (lambda x, o: o.other(x), lambda self, x: x * 9),
    "scale": (lambda x, o: x * type(o).scale + o.other(x), 9.0),
}


@pytest.mark.parametrize("place", Calling.__mro__[1:3], ids=["class between", "base"])
@pytest.mark.parametrize("name", PAST_THE_MODULE)
def test_what_is_looked_up_on_the_class_of_a_module_is_put_there_later(name, place):
    use, item = PAST_THE_MODULE[name]
    inherited = getattr(Scaled, name)
    value = Calling()
    put_back = put(place, name, item)[1] if place is not Scaled else lambda: setattr(place, name, inherited)
    check(lambda x: use(x, value), lambda: setattr(place, name, item), put_back)
