"""What libraries keep for themselves, and the program's classes, read by no name: a change is seen by the next call."""

from __future__ import annotations

import calendar
import contextvars
import copy
import copyreg
import decimal
import enum
import functools
import hashlib
import inspect
import linecache
import logging
import math
import mmap
import operator
import os
import string
import sys
import tempfile
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import foregrad
from tests.programs import Table

# Of makers with `put`: of a function of one tensor, and of changes to make between its calls; `put` is undone.
program = PROGRAMS = Table()
NOTHING = object()
DECIMALS = ("capitals", 0, 1), ("prec", 9, 28)


class Put:
    """`put(owner, name, value)` is a change; all of them are undone by `back()`."""

    def __init__(self):
        self.undo = []

    def __call__(self, owner, name, value):
        before = vars(owner).get(name, NOTHING)
        self.undo.append((lambda: delattr(owner, name)) if before is NOTHING else lambda: setattr(owner, name, before))
        return lambda: setattr(owner, name, value)

    def to(self, table, key, value):
        before = table.get(key, NOTHING)
        self.undo.append((lambda: table.pop(key, None)) if before is NOTHING else lambda: table.update({key: before}))
        return lambda: operator.setitem(table, key, value)

    def by(self, setter, value, before):
        self.undo.append(lambda: setter(before))
        return lambda: setter(value)

    def back(self):
        for undo in reversed(self.undo):
            undo()


# ------------------------------------------------------------------------------------------- names in libraries
@program
def a_constant_of_the_standard_library(put):
    return (lambda x: x * math.pi * len(string.digits)), [put(math, "pi", 3.0), put(string, "digits", "01")]


@program
def an_option_hung_onto_pytorch(put):
    put(torch, "hostile_rate", 2.0)()
    return (lambda x: x * torch.hostile_rate), [put(torch, "hostile_rate", 3.0)]


@program
def an_option_that_is_not_there_yet(put):
    rate = lambda x: x * getattr(torch, "hostile_rate", 1.0) * getattr(nn.Linear, "hostile_rate", 1.0)
    return rate, [put(torch, "hostile_rate", 3.0), put(nn.Linear, "hostile_rate", 2.0)]


@program
def an_option_of_a_class_of_pytorch(put):
    layer = nn.Linear(2, 2)
    put(nn.Linear, "hostile_rate", 2.0)()
    return (lambda x: x * layer.hostile_rate), [put(nn.Linear, "hostile_rate", 3.0)]


@program
def a_private_table_of_pytorch(put):
    def precision(number):
        torch.set_printoptions(precision=number)

    return (lambda x: x * torch._tensor_str.PRINT_OPTS.precision), [put.by(precision, 7, 4)]


@program
def a_module_of_settings(put):
    settings = torch._functorch.config
    return (lambda x: x * settings.activation_memory_budget), [
        put.by(functools.partial(setattr, settings, "activation_memory_budget"), 0.5, 1.0)
    ]


@program
def a_property_of_a_backend(put):
    backend = torch.backends.cuda.matmul
    return (lambda x: x * (2 if backend.allow_fp16_accumulation else 1)), [
        put.by(functools.partial(setattr, backend, "allow_fp16_accumulation"), True, False)
    ]


@program
def a_function_of_pytorch(put):
    return (lambda x: torch.sin(F.relu(x))), [put(F, "relu", lambda x: x * 2), put(torch, "sin", torch.cos)]


@program
def a_function_of_the_standard_library(put):
    return (lambda x: x * math.sqrt(4.0)), [put(math, "sqrt", lambda _: 9.0)]


@program
def the_forward_of_a_class_of_pytorch(put):
    layer = nn.Linear(3, 3)
    return (lambda x: layer(x)), [put(nn.Linear, "forward", lambda self, x: x * 7)]


@program
def an_object_of_the_standard_library(put):
    return (lambda x: x * (2 if sys.stdout is sys.__stdout__ else 1)), [put(sys, "stdout", None)]


@program
def objects_of_datasets(put):
    subset = torch.utils.data.Subset([1.0, 2.0, 4.0], [0, 1])
    return (lambda x: x * subset[1]), [lambda: subset.indices.append(0), lambda: operator.setitem(subset.indices, 1, 2)]


# ------------------------------------------------------------------------------------------- what their code reads
@program
def globals_of_code_that_ran(put):
    part = lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
    which = torch.utils.data.get_worker_info
    return (lambda x: part(x) * (1 if which() is None else 2)), [put(torch.utils.data._utils.worker, "_worker_info", 3)]


@program
def what_a_function_tells(put):
    strategy = torch.multiprocessing.get_sharing_strategy
    set_strategy = torch.multiprocessing.set_sharing_strategy
    other = next(one for one in torch.multiprocessing.get_all_sharing_strategies() if one != strategy())
    return (lambda x: x * len(strategy())), [put.by(set_strategy, other, strategy())]


@program
def what_a_function_of_c_tells(put):
    threads = torch._C._set_multithreading_enabled
    return (lambda x: x * (2 if torch._C._is_multithreading_enabled() else 1)), [put.by(threads, False, True)]


@program
def print_options_of_numpy(put):
    array, options = np.array([1 / 3]), lambda number: np.set_printoptions(precision=number)
    return (lambda x: x * len(f"{array}")), [put.by(options, 3, 8)]


@program
def settings_of_numpy(put):
    function = lambda x: x * (np.getbufsize() / 8192) * (2 if np.geterrcall() is None else 1)
    return function, [put.by(np.setbufsize, 16384, 8192), put.by(np.seterrcall, print, None)]


@program
def the_context_of_decimals(put):
    context = decimal.getcontext()

    def function(x):
        try:
            return x * float(decimal.Decimal(1) / 0)
        except ZeroDivisionError:
            return x * len(str(decimal.Decimal("1e20") * 1))

    changes = [put.by(functools.partial(setattr, context, name), *values) for name, *values in DECIMALS]
    traps = put.to(context.traps, decimal.DivisionByZero, False)
    return function, [*changes, traps]


@program
def tables_of_the_standard_library(put):
    class Thing:
        size = 2.0

    thing = Thing()
    thing.size = 3.0
    linecache.cache["hostile"] = (2, None, ["1\n"], "hostile")
    function = lambda x: x * copy.copy(thing).size * len(logging.getLevelName(10)) * calendar.firstweekday()
    put.undo.append(lambda: logging.addLevelName(10, "DEBUG"))
    return function, [
        put.to(copyreg.dispatch_table, Thing, lambda _: (Thing, ())),
        lambda: logging.addLevelName(10, "D"),
        put.by(calendar.setfirstweekday, 3, 0),
    ]


@program
def levels_of_loggers_found_inside(put):
    function = lambda x: (
        x
        * logging.getLogger("hostile.inner").getEffectiveLevel()
        * (2 if logging.getLogger("hostile").isEnabledFor(40) else 1)
    )
    return function, [put.by(logging.getLogger().setLevel, 10, 30), put.by(logging.disable, 60, 0)]


@program
def the_environment_by_made_up_names(put):
    name = "HOSTILE_SIZE"
    expanded = lambda x: x * len(os.path.expandvars("$HOSTILE_SIZE")) + sum(k == name for k in os.environ)
    return expanded, [put.to(os.environ, name, "ab")]


@program
def all_modules(put):
    return (lambda x: x * (len(sys.modules) % 7)), [put.to(sys.modules, "hostile", types.ModuleType("hostile"))]


# ------------------------------------------------------------------------------------------- objects of C
@program
def variables_in_another_context(put):
    rate = contextvars.ContextVar("rate", default=1.0)
    context = contextvars.copy_context()
    function = lambda x: x * context.get(rate, 2.0) * context.run(rate.get)
    return function, [lambda: context.run(rate.set, 5.0), lambda: context.run(rate.set, 7.0)]


@program
def a_hash(put):
    known = hashlib.sha1(b"a")
    return (lambda x: x * known.digest()[0]), [lambda: known.update(b"b")]


@program
def mapped_memory(put):
    memory = mmap.mmap(-1, 8)
    return (lambda x: x * memory[0]), [lambda: operator.setitem(memory, 0, 6)]


@program
def a_file(put):
    file = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed between calls)
    return (lambda x: x * (2 if file.closed else 1)), [file.close]


@program
def the_size_of_a_cache(put):
    cached = functools.lru_cache(lambda number: number)
    cached(1)
    return (lambda x: x * cached.cache_info().currsize), [lambda: cached(2), cached.cache_clear]


# ------------------------------------------------------------------------------------------- the program's classes
@program
def names_of_classes_and_functions(put):
    class Box:
        pass

    def part():
        pass

    box = Box()
    function = lambda x: x * len(type(box).__name__ + Box.__qualname__ + Box.__module__ + part.__name__)
    changes = [(Box, "__name__", "Case"), (Box, "__qualname__", "Q"), (Box, "__module__", "m"), (part, "__name__", "p")]
    return function, [functools.partial(setattr, *change) for change in changes]


@program
def attributes_gone_through(put):
    class Box:
        on_a = 1

        def on_b(self):
            return 2

    box = Box()

    def function(x):
        there = [name for names in (vars(Box), Box.__dict__, dir(box)) for name in names if name[:3] == "on_"]
        return x * (len(there) + len(dict(inspect.getmembers(box))))

    return function, [put(Box, "on_c", 2), put(Box, "on_d", lambda self: 1), put(box, "on_e", 3), put(box, "on_f", 4)]


@program
def members_of_an_enum(put):
    class Kind(enum.Enum):
        ONE = 1
        TWO = 2

    function = lambda x: x * Kind(1).value * len(Kind.__members__)
    return function, [
        put.to(Kind._value2member_map_, 1, Kind.TWO),
        lambda: operator.setitem(Kind._member_map_, "THREE", Kind.ONE),
    ]


@program
def a_property_that_hides_an_attribute(put):
    class Box:
        pass

    class Net(nn.Module):
        def forward(self, x):
            return x * self.rate

    box, net = Box(), Net()
    box.rate = net.rate = 1.0
    hides = property(lambda self: 5.0)
    return (lambda x: net(x) * box.rate), [lambda: setattr(Box, "rate", hides), lambda: setattr(Net, "rate", hides)]


@program
def attributes_of_a_class_of_tensors(put):
    class Weight(nn.Parameter):
        scale = 1.0

    weight = Weight(torch.ones(3))
    return (lambda x: x * weight.scale), [put(Weight, "scale", 2.0), put(weight, "scale", 3.0)]


@program
def an_object_that_is_a_key(put):
    class Key:
        rate = 1.0

    key = Key()
    table = {key: 2.0}
    return (lambda x: x * sum(key.rate * value for key, value in table.items())), [put(key, "rate", 3.0)]


@program
def items_that_a_class_gives(put):
    class Scaled(dict):
        rate = 1.0

        def __getitem__(self, key):
            return super().__getitem__(key) * self.rate

    table = Scaled(a=2.0)
    changes = [put(table, "rate", 3.0), lambda: operator.setitem(table, "a", 5.0), lambda: table.update(a=7.0)]
    return (lambda x: x * table["a"]), changes


@program
def modules_tables_of_state(put):
    layer = nn.Linear(2, 2)
    sizes = lambda x: x * (1 + len(layer._non_persistent_buffers_set) + len(layer._state_dict_hooks))
    changes = [lambda: layer.register_buffer("kept", torch.ones(1), persistent=False)]
    return sizes, [*changes, lambda: layer._register_state_dict_hook(lambda *_: None)]


def play(name, wrap):
    put = Put()
    try:
        function, changes = PROGRAMS[name](put)
        call, seen = wrap(function), []
        for change in (lambda: None, *changes):
            change()
            for _ in range(2):
                x = torch.arange(1.0, 4.0, requires_grad=True)
                out = call(x)
                seen += [out.tolist(), *(g.tolist() for g in torch.autograd.grad(out.sum(), x))]
        return seen, call
    finally:
        put.back()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_change_is_seen(name):
    torch.manual_seed(0)
    expected, _ = play(name, lambda function: function)
    torch.manual_seed(0)
    found, call = play(name, functools.partial(foregrad.compile, backend="eager", on_unsupported="raise"))
    assert found == expected
    assert len(call.foregrad.inner()) or len(call.foregrad.specializations) > 1


def test_a_class_that_lacks_many_names_and_is_written_to():
    """Tables that change in each call are checked by their items: one name that comes is seen as another goes."""

    class Box:
        count = 0
        spare = 1

    box = Box()

    def function(x):
        Box.count += 1
        return x * (float(box) if hasattr(box, "__float__") else 2.0)

    call = foregrad.compile(function, backend="eager")
    for _ in range(6):
        assert call(torch.ones(1)).item() == 2.0
    del Box.spare
    Box.__float__ = lambda self: 3.0
    assert call(torch.ones(1)).item() == 3.0
    assert Box.count == 7
