"""What programs keep their options in, changed between calls: every call gives what eager gives."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import functools
import itertools
import operator
import os
import random
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

import foregrad
from tests.programs import Table

program = PROGRAMS = Table()  # of makers: of a function of one tensor, and of changes to make between its calls
GAIN = 2
VARIABLE = contextvars.ContextVar("VARIABLE", default=2)
SETTINGS = types.ModuleType("tests_guards_settings")
sys.modules[SETTINGS.__name__] = SETTINGS
exec("scale = 2\nweight = None\ndef scaled(x):\n    return x * scale", vars(SETTINGS))


class Thing:
    def __init__(self, **values):
        vars(self).update(values)


class Table(dict):
    __getattr__ = dict.__getitem__


class Row(list):
    pass


def attribute(thing, name="scale", *values):
    return [functools.partial(setattr, thing, name, value) for value in values or (3, 4.0)]


def global_gain(*values):
    return [functools.partial(globals().__setitem__, "GAIN", value) for value in values or (3, 4.0)]


# -------------------------------------------------------------------- objects and containers


@program
def a_namespace():
    thing = types.SimpleNamespace(scale=2)
    return (lambda x: x * thing.scale), attribute(thing)


@program
def an_argparse_namespace_of_a_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.options = argparse.Namespace(scale=2)

        def forward(self, x):
            return x * self.options.scale

    model = Model()
    return model, attribute(model.options)


@program
def an_object_in_a_dict_with_attributes():
    thing = Thing(scale=2)
    table = Table(inner=thing)
    return (lambda x: x * table.inner.scale), [*attribute(thing), lambda: table.update(inner=Thing(scale=9))]


@program
def an_object_in_a_class_of_list():
    row = Row([types.SimpleNamespace(scale=2)])
    return (lambda x: x * row[0].scale), attribute(row[0])


@program
def a_deque():
    items = collections.deque([1, 2])
    return (lambda x: x * items[0]), [items.rotate, lambda: items.append(3), items.popleft]


@program
def a_chain_of_dicts():
    below = {"scale": 1}
    chain = collections.ChainMap({}, below)
    return (lambda x: x * chain["scale"]), [lambda: below.update(scale=5), lambda: chain.update(scale=7)]


@program
def a_user_dict():
    table = collections.UserDict(scale=1)
    return (lambda x: x * table["scale"]), [lambda: table.update(scale=5)]


@program
def a_read_only_view_of_a_dict():
    table = {"scale": 1}
    view = types.MappingProxyType(table)
    return (lambda x: x * view["scale"]), [lambda: table.update(scale=5)]


@program
def the_order_of_an_ordered_dict():
    table = collections.OrderedDict(a=1, b=2)

    def f(x):
        for value in table.values():
            x = (x + 1) * value
        return x

    return f, [lambda: table.move_to_end("a"), lambda: None, lambda: table.move_to_end("a", last=False)]


@program
def an_item_of_a_set_that_another_equals():
    kinds = {1, 2}

    def f(x):
        return x * 2 if any(kind is True for kind in kinds) else x * 3

    def replace():
        kinds.discard(1)
        kinds.add(True)

    return f, [lambda: (kinds.add(7), kinds.discard(7)), replace, kinds.clear]


@program
def an_array_of_numpy():
    numbers = np.array([1.0, 2.0])
    return (lambda x: x * float(numbers[0])), [lambda: numbers.__setitem__(0, 5.0), lambda: numbers.sort()]


@program
def an_array_made_a_tensor():
    numbers = np.ones(3, dtype=np.float32)
    return (lambda x: x * torch.tensor(numbers)), [lambda: numbers.__setitem__(0, 5.0)]


@program
def an_array_of_python():
    numbers = array.array("d", [1.0])
    return (lambda x: x * numbers[0]), [lambda: numbers.__setitem__(0, 5.0)]


@program
def bytes_that_change():
    numbers = bytearray(b"ab")
    view = memoryview(numbers)
    return (lambda x: x * numbers[0] + view[1]), [lambda: numbers.__setitem__(0, 5), lambda: numbers.__setitem__(1, 5)]


@program
def a_context_variable():
    return (lambda x: x * VARIABLE.get()), [lambda: VARIABLE.set(3) and None, lambda: VARIABLE.set(2) and None]


@program
def a_thread_s_own():
    own = threading.local()
    own.scale = 2
    return (lambda x: x * own.scale), attribute(own)


@program
def the_environment():
    os.environ["FOREGRAD_TEST_SCALE"] = "2"

    def change():
        os.environ["FOREGRAD_TEST_SCALE"] = "3"

    return (lambda x: x * int(os.environ["FOREGRAD_TEST_SCALE"])), [change]


# -------------------------------------------------------------------- names that are made up, or missing


@program
def an_attribute_that_may_be_missing():
    thing = Thing()
    changes = [*attribute(thing, "flag"), lambda: delattr(thing, "flag")]
    return (lambda x: x * 2 if hasattr(thing, "flag") else x * 3), changes


@program
def an_attribute_that_is_tried():
    thing = Thing()

    def f(x):
        try:
            return x * thing.flag
        except AttributeError:
            return x * 7

    return f, attribute(thing, "flag")


@program
def an_attribute_by_a_name_made_up():
    thing = Thing(inner=Thing(scale=2))
    names = ["sca", "le"]
    return (lambda x: x * getattr(thing.inner, "".join(names))), attribute(thing.inner)


@program
def all_attributes():
    thing = Thing(inner=Thing(scale=2))
    return (lambda x: x * sum(vars(thing.inner).values())), attribute(thing.inner, "other")


@program
def an_attribute_by_an_attrgetter():
    thing = Thing(scale=2)
    get = operator.attrgetter("scale")
    return (lambda x: x * get(thing)), attribute(thing)


@program
def a_global_by_other_means():
    return (lambda x: x * globals()["GAIN"]), global_gain()


@program
def a_global_in_text():
    return (lambda x: x * eval("GAIN + 1")), global_gain()


@program
def a_global_through_the_modules():
    return (lambda x: x * sys.modules[__name__].GAIN), global_gain()


# -------------------------------------------------------------------- modules, classes, functions


@program
def a_module_imported_inside():
    def f(x):
        import tests_guards_settings

        return x * tests_guards_settings.scale

    return f, attribute(SETTINGS)


@program
def names_imported_inside():
    def f(x):
        from tests_guards_settings import scale, scaled

        return scaled(x) + scale

    return f, attribute(SETTINGS)


@program
def a_tensor_of_a_module():
    SETTINGS.weight = torch.full((3,), 2.0)

    def f(x):
        import tests_guards_settings

        return x * tests_guards_settings.weight

    changes = [lambda: setattr(SETTINGS, "weight", torch.arange(3.0)), lambda: SETTINGS.weight.mul_(2)]
    return f, changes


@program
def an_attribute_of_a_function():
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 2
    return (lambda x: scaled(x)), attribute(scaled)


@program
def a_tensor_of_a_function():
    def weighted(x):
        return x * weighted.weight

    weighted.weight = torch.full((3,), 2.0)
    return weighted, [lambda: setattr(weighted, "weight", torch.arange(3.0)), lambda: weighted.weight.mul_(2)]


@program
def an_attribute_of_a_metaclass():
    class Meta(type):
        scale = 2

    class Made(metaclass=Meta):
        pass

    return (lambda x: x * Made.scale), [*attribute(Meta), *attribute(Made)]


@program
def an_attribute_hidden_step_by_step():
    class Base:
        scale = 2

    class Derived(Base):
        pass

    thing = Derived()
    return (lambda x: x * thing.scale), [*attribute(Base), *attribute(Derived, "scale", 5, 6), *attribute(thing)]


@program
def an_attribute_of_a_module_hidden_step_by_step():
    class Base(nn.Module):
        scale = 2

        def twist(self, x):
            return x * 2

        def forward(self, x):
            return self.twist(x) * self.scale

    class Derived(Base):
        pass

    model = Derived()
    twist = [lambda: setattr(Derived, "twist", lambda self, x: x * 5)]
    return model, [*attribute(Base), *attribute(Derived, "scale", 5), *twist, *attribute(model)]


@program
def a_property_replaced():
    class Made(nn.Module):
        @property
        def scale(self):
            return 2

        def forward(self, x):
            return x * self.scale

    return Made(), [lambda: setattr(Made, "scale", property(lambda self: 3)), lambda: setattr(Made, "scale", 7)]


@program
def a_class_method_replaced():
    class Made:
        @classmethod
        def scale(cls):
            return 2

    changes = [lambda: setattr(Made, "scale", classmethod(lambda cls: 3)), lambda: setattr(Made, "scale", lambda: 7)]
    return (lambda x: x * Made.scale()), changes


@program
def a_partial_method():
    class Made:
        gain = 2

        def scaled(self, x, n):
            return x * self.gain * n

        tripled = functools.partialmethod(scaled, n=3)

    thing = Made()
    again = functools.partialmethod(Made.scaled, n=5)
    return (lambda x: thing.tripled(x)), [*attribute(Made, "gain"), lambda: setattr(Made, "tripled", again)]


@program
def another_class():
    class One:
        def twist(self, x):
            return x * 2

    class Two:
        def twist(self, x):
            return x * 3

    thing = One()
    return (lambda x: thing.twist(x)), [lambda: setattr(thing, "__class__", Two)]


@program
def another_table_of_attributes():
    thing = Thing(scale=2)
    return (lambda x: x * thing.scale), [lambda: setattr(thing, "__dict__", {"scale": 3})]


@program
def a_cached_function():
    @functools.lru_cache
    def scale(n):
        return n * GAIN

    return (lambda x: x * scale(3)), [*global_gain(3), scale.cache_clear]


@program
def a_cached_tensor():
    @functools.lru_cache
    def positions(n):
        return torch.arange(float(n))

    return (lambda x: x * positions(3)), [lambda: None, lambda: positions(3).mul_(2), lambda: None]


@program
def a_cache_on_a_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = None
            self.by_length = {}

        def forward(self, x):
            n = x.shape[0]
            if self.positions is None or self.positions.shape[0] != n:
                self.positions = torch.arange(float(n))
            if n not in self.by_length:
                self.by_length[n] = torch.ones(n)
            return x * self.positions + self.by_length[n]

    model = Model()
    clear = [lambda: setattr(model, "positions", None), model.by_length.clear]
    return model, [lambda: None, lambda: model.positions.mul_(2), *clear, lambda: None]


@program
def a_state_on_a_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.zeros(3)

        def forward(self, x):
            self.state = self.state + x.detach()
            return x * self.state

    return Model(), [lambda: None] * 3


@program
def a_count_on_an_object_of_a_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stats = Thing(scale=2, seen=0)

        def forward(self, x):
            return x * self.stats.scale

    model = Model()
    return model, [*attribute(model.stats, "seen"), *attribute(model.stats)]


# -------------------------------------------------------------------- what is asked of tensors


def other(*make):
    """Calls with tensors of these kinds."""
    return [lambda m=m: m() for m in make]


def leaf():
    return torch.arange(1.0, 4.0, requires_grad=True)


def with_grad():
    x = leaf()
    x.grad = torch.ones(3)
    return x


@program
def whether_it_is_a_leaf():
    return (lambda x: x * 2 if x.is_leaf else x * 3), other(leaf, lambda: leaf() * 1, leaf)


@program
def where_it_comes_from():
    def f(x):
        return x * (1 if x.grad_fn is None else len(x.grad_fn.name()))

    return f, other(leaf, lambda: leaf() * 1, lambda: leaf() + 1)


@program
def how_often_it_was_written():
    def written():
        x = leaf().detach()
        x.add_(1)
        return x

    return (lambda x: x * (x._version + 1)), other(lambda: leaf().detach(), written)


@program
def whether_it_is_a_view():
    make = [lambda: torch.ones(3), lambda: torch.ones(6)[:3], lambda: torch.ones(3)]
    return (lambda x: x * 2 if x._is_view() else x * 3), other(*make)


@program
def where_it_starts():
    make = [lambda: torch.ones(6)[1:4], lambda: torch.ones(6)[2:5], lambda: torch.ones(6)[1:4]]
    return (lambda x: x * (x.storage_offset() + 1)), other(*make)


@program
def what_hangs_onto_it():
    def tagged(value):
        x = torch.ones(3)
        x.tag = value
        return x

    make = [lambda: torch.ones(3), lambda: tagged(2), lambda: tagged(3), lambda: torch.ones(3)]
    return (lambda x: x * getattr(x, "tag", 7)), other(*make)


@program
def what_hangs_onto_a_parameter():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.weight.scale = 2

        def forward(self, x):
            return x * self.weight * self.weight.scale

    model = Model()
    return model, attribute(model.weight)


@program
def a_gradient_of_a_parameter():
    weight = leaf()
    changes = [
        lambda: setattr(weight, "grad", torch.full((3,), 2.0)),
        lambda: [weight.grad.mul_(3)],
        lambda: setattr(weight, "grad", None),
    ]
    return (lambda x: x * 2 if weight.grad is None else x * weight.grad), changes


@program
def whether_it_has_hooks():
    def hooked():
        x = leaf()
        x.register_hook(lambda g: g * 2)
        return x

    return (lambda x: x * 2 if x._backward_hooks is None else x * 3), other(leaf, hooked)


@program
def a_parameter_as_its_own_argument():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0))

        def forward(self, x):
            return x * 2 + self.weight if x is self.weight else x * 3 + self.weight

    model = Model()
    return model, other(leaf, lambda: model.weight, leaf)


def call(function, x):
    torch.manual_seed(0)
    out = function(x)
    gradients = torch.autograd.grad(out.sum(), x) if x.requires_grad else ()
    return [t.detach().clone() for t in (out, *gradients)]


def play(name, compiled):
    globals()["GAIN"] = 2
    vars(SETTINGS).update(scale=2)
    VARIABLE.set(2)
    function, changes = PROGRAMS[name]()
    run = foregrad.compile(function, backend="eager") if compiled else function
    seen = [call(run, leaf())]
    for change in changes:
        given = change()
        seen += [call(run, given if isinstance(given, torch.Tensor) else leaf()) for _ in range(2)]
    return seen


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_the_same_as_eager(name):
    for number, (expected, actual) in enumerate(zip(play(name, False), play(name, True), strict=True)):
        for a, b in zip(expected, actual, strict=True):
            assert torch.equal(a, b), f"call {number}"


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (random.Random, lambda r: r.random()),
        (np.random.RandomState, lambda r: r.rand()),
        (np.random.default_rng, lambda r: r.random()),
    ],
)
def test_a_drawn_number_that_is_made_a_float_is_a_number_of_the_graph(generator, draw):
    def seen(wrap):
        source = generator(0)
        call = wrap(lambda x: x * float(draw(source)))
        return [call(leaf()).tolist() for _ in range(5)], draw(source)

    compiled = functools.partial(foregrad.compile, backend="eager", on_unsupported="raise")
    made = []
    assert seen(lambda function: made.append(compiled(function)) or made[0]) == seen(lambda function: function)
    assert len(made[0].foregrad.compilations) <= 2


# -------------------------------------------------------------------- refused


def numbers():
    yield from range(100)


@pytest.mark.parametrize(
    ("source", "take", "said"),
    [
        (numbers(), next, "takes from `source`"),
        (iter([1, 2, 3]), next, "takes from `source`"),
        (itertools.count(), next, "takes from `source`"),
        (itertools.cycle([1, 2]), next, "takes from `source`"),
    ],
)
def test_an_iterator_that_is_used_up_is_refused(source, take, said):
    function = foregrad.compile(lambda x: x * float(take(source)), backend="eager")
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match=said):
        function(leaf())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x * x.data_ptr(), "address of"),
        (lambda x: (torch.initial_seed(), x * 2)[1], "random generator"),
        (lambda x: (torch.set_rng_state(torch.get_rng_state()), x * torch.rand(3))[1], "random generator"),
        (lambda x: (setattr(x, "tag", 2), x * 2)[1], "tag"),
    ],
)
def test_what_no_later_call_could_agree_with_is_refused(function, said):
    with pytest.raises(foregrad.errors.UnsupportedError, match=said):
        foregrad.compile(function, backend="eager")(with_grad())


def test_a_gradient_that_is_an_argument_as_well_is_refused():
    weight = with_grad()
    with pytest.raises(foregrad.errors.UnsupportedError, match="and both are used"):
        foregrad.compile(lambda x: x * weight.grad, backend="eager")(weight.grad)


def test_a_result_left_on_a_module_is_that_of_each_call():
    class Model(nn.Module):
        def forward(self, x):
            self.loss = x.sum()
            return x * 2

    model = Model()
    compiled = foregrad.compile(model, backend="eager")
    for i in range(3):
        compiled(leaf() + i)
        assert torch.equal(model.loss, (leaf() + i).sum())
        assert model.loss.requires_grad
    assert len(compiled.foregrad.specializations) == 1  # the first call ran eagerly: it might have filled a cache


def test_a_state_that_changes_on_every_call_is_an_effect():
    model, _ = a_state_on_a_module()
    eager, _ = a_state_on_a_module()
    compiled = foregrad.compile(model, backend="eager")
    for _ in range(4):
        assert torch.equal(compiled(leaf()), eager(leaf()))
    assert len(compiled.foregrad.specializations) == 1
    with foregrad.config.override(recompile_limit=0, error_on_recompile_limit=True):
        strict = foregrad.compile(a_state_on_a_module()[0], backend="eager")
    with pytest.raises(foregrad.errors.UnsupportedError):
        strict(leaf())


def test_methods_and_numbers_of_numpy_are_compared_by_value():
    class Scaler:
        def scaled(self, x):
            return x * 2

    scaler = Scaler()
    f = foregrad.compile(lambda g, x, n: g(x) * n, backend="eager")
    for n in (np.float32(2), np.float32(2), np.int64(2)):
        assert torch.equal(f(scaler.scaled, leaf(), n), leaf() * 2 * n)
    assert len(f.foregrad.specializations) == 2


def test_the_class_of_a_dataclass_argument_is_looked_at():
    scale = [2]

    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor

        def scaled(self):
            return self.x * scale[0]

    f = foregrad.compile(lambda pair: pair.scaled(), backend="eager")
    assert torch.equal(f(Pair(leaf())), leaf() * 2)
    scale[0] = 3
    assert torch.equal(f(Pair(leaf())), leaf() * 3)
    Pair.scaled = lambda self: self.x * 9
    assert torch.equal(f(Pair(leaf())), leaf() * 9)


class Lazy(collections.OrderedDict):
    """A mapping that makes its values when they are asked for, as a registry of classes does."""

    def __init__(self):
        super().__init__()
        self.made = []

    def keys(self):
        return ["one", "two"]

    def values(self):
        return [self[key] for key in self.keys()]

    def items(self):
        return [(key, self[key]) for key in self.keys()]

    def __iter__(self):
        return iter(self.keys())

    def __getitem__(self, key):
        self.made.append(key)
        return {"one": 1, "two": 2}[key]


REGISTRY = Lazy()


def test_a_mapping_is_looked_at_as_it_is_stored_not_by_its_own_methods():
    REGISTRY.made.clear()
    compiled = foregrad.compile(lambda x: x * len(REGISTRY), backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.zeros(2))
    assert len(compiled.foregrad.compilations) == 1
    assert REGISTRY.made == []
