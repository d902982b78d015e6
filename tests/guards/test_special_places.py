"""Values in places that no attribute is read of by its name: each change is seen by the next call."""

from __future__ import annotations

import contextvars
import datetime as dt
import enum
import functools
import inspect
import random
import sys
import types
import typing
import warnings

import numpy as np
import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from tests.programs import Table

program = PROGRAMS = Table()


class Special:
    """A class that lacks special methods; `use` asks for one, which it gets and loses."""

    def __init__(self, name, method, use):
        self.name, self.method, self.use = name, method, use

    def __call__(self):
        class Bare:
            pass

        bare = Bare()

        def function(x):
            try:
                return x * self.use(bare)
            except TypeError:
                return -x

        return function, [lambda: setattr(Bare, self.name, self.method), lambda: delattr(Bare, self.name)]


for name, method, use in (
    ("__float__", lambda bare: 3.0, float),
    ("__index__", lambda bare: 1, lambda bare: [2.0, 3.0][bare]),
    ("__call__", lambda bare: 3.0, lambda bare: bare()),
    ("__contains__", lambda bare, key: True, lambda bare: 3.0 if 1 in bare else 2.0),
    ("__getitem__", lambda bare, key: 3.0, lambda bare: bare[0]),
    ("__radd__", lambda bare, other: 3.0, lambda bare: 2.0 + bare),
    ("__lt__", lambda bare, other: True, lambda bare: 3.0 if bare < 1 else 2.0),
    ("__matmul__", lambda bare, other: 3.0, lambda bare: bare @ 1),
    ("__hash__", lambda bare: 5, lambda bare: 3.0 if hash(bare) == 5 else 2.0),
    ("__str__", lambda bare: "three", lambda bare: 3.0 if str(bare) == "three" else 2.0),
    ("__enter__", lambda bare: 3.0, lambda bare: bare.__enter__() if hasattr(bare, "__enter__") else 2.0),
    ("__class_getitem__", classmethod(lambda bare, key: 3.0), lambda bare: type(bare)[0]),
):
    PROGRAMS[f"later {name}"] = Special(name, method, use)


@program
def special_method_that_is_none():
    class Known:
        __hash__ = None

    known = Known()

    def function(x):
        try:
            return x * hash(known)
        except TypeError:
            return -x

    return function, [lambda: setattr(Known, "__hash__", lambda known: 4), lambda: setattr(Known, "__hash__", None)]


@program
def special_method_that_is_an_object():
    class Called:
        def __init__(self, value):
            self.value = value

        def __call__(self):
            return self.value

    class Known:
        __float__ = Called(2.0)

    known = Known()
    changes = [lambda: setattr(Known, "__float__", Called(4.0)), lambda: setattr(Known.__float__, "value", 7.0)]
    return lambda x: x * float(known), changes


@program
def attribute_of_a_class_asked_of_an_object():
    class Known:
        pass

    known = Known()
    return lambda x: x * (2.0 if hasattr(known, "rate") else 1.0), [
        lambda: setattr(known, "rate", 1),
        lambda: delattr(known, "rate"),
        lambda: setattr(Known, "rate", 1),
    ]


@program
def annotations_of_a_function():
    def told(rate: 2.0):
        pass

    told.__annotations__["rate"] = 2.0
    changes = [lambda: told.__annotations__.update(rate=3.0), lambda: setattr(told, "__annotations__", {"rate": 4.0})]
    return lambda x: x * told.__annotations__["rate"], changes


@program
def annotations_of_a_class():
    class Told:
        rate: float = 1.0

    return lambda x: x * len(typing.get_type_hints(Told)), [lambda: Told.__annotations__.update(other=int)]


@program
def default_in_a_signature():
    def told(rate=2.0):
        pass

    return lambda x: x * inspect.signature(told).parameters["rate"].default, [
        lambda: setattr(told, "__defaults__", (5.0,))
    ]


@program
def default_of_a_function_that_is_not_called():
    def told(rate=2.0):
        pass

    return lambda x: x * told.__defaults__[0], [lambda: setattr(told, "__defaults__", (5.0,))]


@program
def zone_of_a_time():
    class Zone(dt.tzinfo):
        hours = 1

        def utcoffset(self, when):
            return dt.timedelta(hours=self.hours)

    zone = Zone()
    when = dt.datetime(2020, 1, 1, tzinfo=zone)
    return lambda x: x * when.utcoffset().total_seconds(), [
        lambda: setattr(zone, "hours", 2),
        lambda: setattr(Zone, "utcoffset", lambda zone, when: dt.timedelta(hours=5)),
    ]


@program
def module_under_another_name():
    one, other = types.ModuleType("one_of_guards"), types.ModuleType("other_of_guards")
    one.rate, other.rate = 2.0, 3.0
    sys.modules["alias_of_guards"] = one

    def function(x):
        import alias_of_guards

        return x * alias_of_guards.rate

    return function, [
        lambda: sys.modules.update(alias_of_guards=other),
        lambda: sys.modules.update(alias_of_guards=one),
    ]


@program
def module_that_comes_later():
    late = types.ModuleType("late_of_guards")
    late.rate = 4.0
    sys.modules.pop("late_of_guards", None)

    def function(x):
        try:
            import late_of_guards
        except ImportError:
            return x
        return x * late_of_guards.rate

    return function, [lambda: sys.modules.update(late_of_guards=late), lambda: setattr(late, "rate", 5.0)]


@program
def value_of_an_enum():
    class Rate(enum.Enum):
        SLOW = 2.0

    return lambda x: x * Rate.SLOW.value, [lambda: setattr(Rate.SLOW, "_value_", 4.0)]


@program
def method_registered_for_a_class():
    class Known:
        @functools.singledispatchmethod
        def rate(self, value):
            return 2.0

    known = Known()
    return lambda x: x * known.rate(3), [lambda: vars(Known)["rate"].register(int, lambda known, value: 5.0)]


@program
def default_of_a_context_variable():
    rate = contextvars.ContextVar("rate", default=[2.0])  # noqa: B039 - what is looked at
    return lambda x: x * rate.get()[0], [lambda: rate.get().__setitem__(0, 5.0)]


@program
def object_in_a_context_variable():
    held, rate = types.SimpleNamespace(rate=2.0), contextvars.ContextVar("rate")
    rate.set({"held": held})
    return lambda x: x * rate.get()["held"].rate, [lambda: setattr(held, "rate", 5.0)]


@program
def filters_of_warnings():
    return lambda x: x * len(warnings.filters), [lambda: warnings.simplefilter("ignore", UserWarning)]


@program
def whether_an_array_may_be_written():
    array = np.ones(2)
    return lambda x: x * (2.0 if array.flags.writeable else 1.0), [lambda: array.setflags(write=False)]


@program
def method_that_only_a_library_calls():
    table = {"other": 1}

    class Rate(enum.Enum):
        SLOW, FAST = 1, 2

        @classmethod
        def _missing_(cls, value):
            return cls(table["other"])

    return lambda x: x * Rate(77).value, [lambda: table.update(other=2)]


@program
def attribute_behind_a_getattr_of_the_class():
    class Options:
        def __init__(self, **options):
            self.__dict__.update(options)

        def __getattr__(self, name):
            return None

    options = Options(rate=1.0)
    return lambda x: x * (options.rate or 5.0) * (options.scale or 2.0), [
        lambda: setattr(options, "scale", 3.0),
        lambda: delattr(options, "rate"),
    ]


@program
def attributes_that_a_protocol_names():
    @typing.runtime_checkable
    class Goes(typing.Protocol):
        def go(self): ...

    class Known:
        pass

    known = Known()
    return lambda x: x * (2.0 if isinstance(known, Goes) else 1.0), [
        lambda: setattr(Known, "go", lambda known: 1),
        lambda: delattr(Known, "go"),
    ]


@program
def code_of_a_function_that_is_not_called():
    def told():
        return 3.0

    return lambda x: x * told.__code__.co_consts[-1], [lambda: setattr(told, "__code__", (lambda: 7.0).__code__)]


@program
def array_in_an_object_of_numpy():
    line = np.poly1d([1.0, 2.0])
    return lambda x: x * float(line(2.0)), [lambda: line.coeffs.__setitem__(0, 5.0)]


@program
def derived_classes():
    class Known:
        pass

    held = []
    return lambda x: x * len(Known.__subclasses__()), [lambda: held.append(type("Derived", (Known,), {}))]


@program
def attributes_that_a_pattern_takes():
    class Pair:
        __match_args__ = ("one", "two")

        def __init__(self):
            self.one, self.two = 2.0, 3.0

    pair, scope = Pair(), {}
    exec("def take(pair):\n match pair:\n  case Pair(a, b): return a * 10 + b", {"Pair": Pair}, scope)
    take = scope["take"]
    return lambda x: x * take(pair), [
        lambda: setattr(pair, "one", 5.0),
        lambda: setattr(Pair, "__match_args__", ("two", "one")),
    ]


@program
def variables_of_special_methods_of_a_module():
    table = {"call": 2.0, "get": 3.0, "set": 5.0}

    class Part(torch.nn.Module):
        def __call__(self, x):
            return super().__call__(x) * table["call"]

        def __getattr__(self, name):
            return table["get"] if name == "rate" else super().__getattr__(name)

        def __setattr__(self, name, value):
            super().__setattr__(name, value * table["set"] if name == "kept" else value)

        def forward(self, x):
            self.kept = 7.0
            return x * self.rate + self.kept

    part = Part()
    return lambda x: part(x), [lambda key=key: table.update({key: 11.0}) for key in table]


@program
def variables_of_a_hook_that_only_a_library_calls():
    module, table = torch.nn.Linear(2, 2), {"rate": 2.0}
    module.register_state_dict_post_hook(lambda module, state, *_: state.update(rate=table["rate"]))
    return lambda x: x * module.state_dict()["rate"], [lambda: table.update(rate=3.0)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_change_is_seen(name):
    with warnings.catch_warnings():
        function, changes = PROGRAMS[name]()
        compiled = foregrad.compile(function, backend="eager")
        for change in (lambda: None, *changes):
            change()
            for _ in range(2):
                x = torch.tensor([1.0, 2.0, 3.0])
                assert torch.equal(compiled(x), function(x))
        assert compiled.foregrad.specializations


def test_normal_numbers_of_an_own_generator_are_drawn_in_one_graph():
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.random = random.Random(3)

        def forward(self, x):
            return x * self.random.gauss(0, 1)

    one, other = Noisy(), Noisy()
    compiled = foregrad.compile(other, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForegradWarning)
        for _ in range(6):
            assert torch.equal(compiled(torch.ones(2)), one(torch.ones(2)))
            assert one.random.getstate() == other.random.getstate()
    assert str(foregrad.explain_recompiles(compiled)).startswith("Noisy: compiled once")
