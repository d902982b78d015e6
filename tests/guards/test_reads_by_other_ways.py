"""Values that code comes by in ways that name them nowhere: each change is seen by the next call."""

from __future__ import annotations

import abc
import builtins
import collections
import collections.abc
import enum
import functools
import json
import logging
import os
import string
import sys
import types

import numpy as np
import pytest
import torch

import foregrad
from tests.programs import Table

program = PROGRAMS = Table()


@program
def option_of_a_module():
    options = types.ModuleType("options")
    options.rate1, options.table2 = 2.0, {"k": 3.0}

    def function(x):
        return x * getattr(options, f"rate{1}") * getattr(options, f"table{2}")["k"]

    return function, [lambda: setattr(options, "rate1", 5.0), lambda: options.table2.update(k=7.0)]


class Options:
    rate = 2.0


@program
def field_of_a_format():
    options = Options()

    def function(x):
        return x * float(str.format("{0.rate}", options))

    return function, [lambda: setattr(options, "rate", 5.0)]


@program
def item_in_a_format():
    options = {"rate": Options()}

    def function(x):
        return x * float("{options[rate].rate:.1f}".format_map({"options": options}))

    return function, [lambda: setattr(options["rate"], "rate", 5.0)]


@program
def global_that_appears():
    namespace = {}
    exec("def function(x):\n    try: return x * RATE\n    except NameError: return x * 2", namespace)
    return namespace["function"], [lambda: namespace.update(RATE=5.0), lambda: namespace.pop("RATE")]


@program
def end_of_a_long_chain():
    head = last = Options()
    for _ in range(60):
        last.next = Options()
        last = last.next

    def function(x):
        node = head
        while hasattr(node, "next"):
            node = node.next
        return x * node.rate

    return function, [lambda: setattr(last, "rate", 5.0)]


@program
def equal_keys_of_another_type():
    table = {1: 2.0}

    def function(x):
        return x * (2 if type(next(iter(table))) is int else 3)

    def change():
        table.clear()
        table[True] = 2.0

    return function, [change]


@program
def equal_keys_of_an_ordered_dict():
    table = collections.OrderedDict({1: 2.0, "k": 1.0})

    def function(x):
        return x * (2 if type(next(iter(table))) is int else 3)

    def change():
        table.clear()
        table.update({1.0: 2.0, "k": 1.0})

    return function, [change]


def abstract_class_found_in(place):
    class Abstract(abc.ABC):  # noqa: B024
        pass

    kinds = {"a tuple": (Abstract, str), "the library": collections.abc.Sized}.get(place, Abstract)
    box = types.SimpleNamespace(kind=kinds)

    class Other:
        pass

    def function(x, kind=kinds):
        return x * 2 if isinstance(other, box.kind if place == "an attribute" else kind) else x

    other = Other()
    return function, [lambda: (collections.abc.Sized if place == "the library" else Abstract).register(Other)]


for _place in ("a tuple", "an attribute", "a default", "the library"):
    PROGRAMS[f"abstract_class_in_{_place}"] = functools.partial(abstract_class_found_in, _place)


@program
def class_registered_with_a_derived_one():
    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Derived(Abstract):
        pass

    class Other:
        pass

    other, kinds = Other(), (Abstract,)
    return lambda x: x * 2 if isinstance(other, kinds) else x, [lambda: Derived.register(Other)]


@program
def value_of_an_exception():
    stop, context = StopIteration(2.0), KeyError(3.0)
    failed = ValueError("lost")
    failed.__context__ = context

    def function(x):
        return x * stop.value + failed.__context__.args[0]

    return function, [
        lambda: setattr(stop, "value", 5.0),
        lambda: setattr(failed, "__context__", KeyError(7.0)),
        lambda: setattr(failed.__context__, "args", (8.0,)),
    ]


@program
def state_of_a_partial():
    scaled = functools.partial(lambda rate, x, shift=0.0: x * rate + shift, 2.0)

    def function(x):
        return scaled(x)

    return function, [
        lambda: scaled.__setstate__((scaled.func, (5.0,), {}, {})),
        lambda: scaled.__setstate__((scaled.func, (5.0,), {"shift": 1.0}, {})),
        lambda: scaled.__setstate__((lambda rate, x, shift: x - rate, (5.0,), {"shift": 1.0}, {})),
    ]


@program
def cell_that_is_an_object():
    box = types.SimpleNamespace(cell=types.CellType(2.0))
    return lambda x: x * box.cell.cell_contents, [lambda: setattr(box.cell, "cell_contents", 3.0)]


@program
def attribute_of_a_logger():
    logger = logging.getLogger("tests.guards.of_a_test")
    logger.rate = 2.0

    def function(x):
        return x * logger.rate * (2 if logger.propagate else 1) * (1 + len(logger.handlers))

    return function, [
        lambda: setattr(logger, "rate", 3.0),
        lambda: setattr(logger, "propagate", False),
        lambda: logger.addHandler(logging.NullHandler()),
    ]


@program
def switch_of_a_backend():
    def function(x):
        before = torch.backends.nnpack.set_flags(True)[0]
        torch.backends.nnpack.set_flags(before)
        return x * 2 if before else x

    return function, [lambda: torch.backends.nnpack.set_flags(False), lambda: torch.backends.nnpack.set_flags(True)]


@program
def view_of_a_dict():
    table = {"a": 2.0}
    values = table.values()
    return lambda x: x * sum(values), [lambda: table.update(b=3.0), lambda: table.update(a=9.0)]


@program
def variables_of_the_environment():
    def function(x):
        return x * (1 + sum(1 for name in os.environ if name.startswith("TESTS_GUARDS_")))

    return function, [lambda: os.environ.update(TESTS_GUARDS_A="1"), lambda: os.environ.pop("TESTS_GUARDS_A")]


class Percent(string.Template):
    delimiter = "%"


@program
def attribute_that_a_library_reads():
    template = Percent("%a")
    return lambda x: x * len(template.substitute(a="xyz")), [lambda: setattr(template, "template", "%a%a")]


@program
def method_that_a_library_calls():
    class Encoder(json.JSONEncoder):
        def default(self, value):
            return "ab"

    return (
        lambda x: x * len(json.dumps(object, cls=Encoder)),
        [lambda: setattr(Encoder, "default", lambda self, value: "abcd")],
    )


@program
def special_method_that_appears():
    class Plain:
        rate = 1.0

    plain = Plain()
    return (
        lambda x: x * (2 if plain else 3) * getattr(plain, "other", 1.0),
        [
            lambda: setattr(Plain, "__bool__", lambda self: False),
            lambda: setattr(Plain, "__getattr__", lambda self, name: 5.0),
        ],
    )


@program
def built_in_of_the_programs():
    builtins.rate_of_tests = 2.0
    return lambda x: x * rate_of_tests, [lambda: setattr(builtins, "rate_of_tests", 3.0)]  # noqa: F821


@program
def built_in_that_appears():
    vars(builtins).pop("other_rate_of_tests", None)

    def function(x):
        try:
            return x * other_rate_of_tests
        except NameError:
            return x

    return function, [lambda: setattr(builtins, "other_rate_of_tests", 3.0)]


@program
def value_of_an_enum():
    class Kind(enum.Enum):
        ONE = [2.0]

    return lambda x: x * Kind.ONE.value[0], [lambda: Kind.ONE.value.__setitem__(0, 3.0)]


@program
def name_that_a_module_makes_up():
    options = types.ModuleType("made_up_options")
    options.__getattr__ = lambda name: 2.0
    return lambda x: x * options.rate, [
        lambda: setattr(options, "__getattr__", lambda name: 4.0),
        lambda: setattr(options, "rate", 3.0),
    ]


@program
def object_in_an_array():
    held = types.SimpleNamespace(rate=2.0)
    array = np.array([held], dtype=object)
    return lambda x: x * array[0].rate, [lambda: setattr(held, "rate", 3.0)]


@program
def factory_of_a_dict():
    table, rate = collections.defaultdict(lambda: rate), 2.0

    def change():
        nonlocal rate
        rate = 3.0

    return (
        lambda x: x * (table.default_factory() if table.default_factory else 7),
        [change, lambda: setattr(table, "default_factory", None)],
    )


@program
def function_that_c_holds():
    sign = 1
    key = functools.cmp_to_key(lambda a, b: (a - b) * sign)

    def change():
        nonlocal sign
        sign = -1

    return lambda x: x * min([1.0, 2.0], key=key), [change]


@program
def module_imported_where_it_is_used():
    one, other = (types.ModuleType("imported_by_tests_of_guards") for _ in range(2))
    one.rate, other.rate = 2.0, 3.0
    sys.modules[one.__name__] = one

    def function(x):
        import imported_by_tests_of_guards

        return x * imported_by_tests_of_guards.rate

    return function, [lambda: sys.modules.update({one.__name__: other})]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_change_is_seen(name):
    function, changes = PROGRAMS[name]()
    compiled = foregrad.compile(function, backend="eager")
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            ours, theirs = compiled(x), function(x)
            assert torch.equal(ours, theirs)
            assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)))


def test_a_class_that_is_registered_elsewhere_makes_no_graph_stale():
    """Each import may register classes, with abstract classes that the program never asks about."""

    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Unasked(abc.ABC):  # noqa: B024
        pass

    values = [1.0, 2.0]

    def function(x):
        return x * sum(values) if isinstance(values, (collections.abc.Sequence, Abstract)) else x

    call, x = foregrad.compile(function, backend="eager", on_unsupported="raise"), torch.ones(2)
    for _ in range(3):
        assert torch.equal(call(x), x * 3)
        Unasked.register(type("Other", (), {}))
        type("Derived", (Abstract,), {})
    assert len(call.foregrad.specializations) == 1
    Abstract.register(type("Other", (), {}))
    assert torch.equal(call(x), x * 3)
    assert len(call.foregrad.specializations) == 2
