"""Values that code comes by in ways that name them nowhere: each change is seen by the next call."""

from __future__ import annotations

import collections
import types

import pytest
import torch

import foregrad

PROGRAMS = {}


def program(make):
    PROGRAMS[make.__name__] = make
    return make


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
