"""Options kept in objects and switches of libraries, changed between calls: every call gives what eager gives."""

from __future__ import annotations

import collections
import configparser
import ctypes
import decimal
import functools
import io
import logging
import operator
import queue
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import foregrad
from tests.programs import Table

program = PROGRAMS = Table()  # of makers: of a function of one tensor, and of changes to make between its calls


class Thing:
    scale = 2

    def scaled(self, number):
        return number * self.scale


def put(holder, **values):
    def change():
        for name, value in values.items():
            setattr(holder, name, value)

    return change


def item(holder, key, value):
    return lambda: operator.setitem(holder, key, value)


def switched(context):
    return [context.__enter__, lambda: context.__exit__(None, None, None)]


@program
def an_event():
    event = threading.Event()
    return (lambda x: x * 2 if event.is_set() else x * 3), [event.set, event.clear]


@program
def a_queue():
    waiting = queue.Queue()
    return (lambda x: x * (1 + waiting.qsize())), [lambda: waiting.put(1), lambda: waiting.put(2), waiting.get]


@program
def a_config_parser():
    config = configparser.ConfigParser()
    config.read_dict({"model": {"scale": "2"}})
    return (lambda x: x * float(config["model"]["scale"])), [lambda: config.set("model", "scale", "3")]


@program
def the_rate_of_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    return (lambda x: x * optimizer.param_groups[0]["lr"]), [item(optimizer.param_groups[0], "lr", 0.5)]


@program
def the_rate_of_a_scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step():
        optimizer.step()
        scheduler.step()

    return (lambda x: x * scheduler.get_last_lr()[0]), [step, step]


@program
def the_scale_of_a_gradient_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    return scaler.scale, [lambda: scaler.update(16.0), lambda: scaler.update(4.0)]


@program
def a_distribution():
    normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    return normal.log_prob, [put(normal, loc=torch.ones(3)), lambda: normal.loc.add_(1)]


@program
def a_weak_reference():
    thing = Thing()
    reference = weakref.ref(thing)
    return (lambda x: x * reference().scale), [put(thing, scale=4)]


@program
def a_weak_proxy():
    thing = Thing()
    proxy = weakref.proxy(thing)
    return (lambda x: x * proxy.scale), [put(thing, scale=4)]


@program
def a_dict_of_weak_keys():
    thing = Thing()
    table = weakref.WeakKeyDictionary({thing: 2})
    return (lambda x: x * table[thing]), [item(table, thing, 5)]


@program
def a_dict_of_weak_values():
    first, second = Thing(), Thing()
    second.scale = 7
    table = weakref.WeakValueDictionary({"one": first})
    return (lambda x, _=first: x * table["one"].scale), [item(table, "one", second), put(second, scale=9)]


@program
def the_command_line():
    return (lambda x: x * len(sys.argv)), [lambda: sys.argv.append("more"), lambda: sys.argv.pop()]


@program
def the_level_of_a_logger():
    above, logger = logging.getLogger("foregrad_tests"), logging.getLogger("foregrad_tests.inner")
    above.setLevel(logging.INFO)
    logger.setLevel(logging.NOTSET)
    return (
        (lambda x: x * 2 if logger.isEnabledFor(logging.INFO) else x * 3),
        [lambda: above.setLevel(logging.ERROR), lambda: logger.setLevel(logging.DEBUG)],
    )


@program
def a_number_of_c():
    number = ctypes.c_int(2)
    return (lambda x: x * number.value), [put(number, value=5)]


@program
def the_precision_of_decimals():
    context = decimal.getcontext()
    exact = context.prec
    return (
        lambda x: x.double() * float(decimal.Decimal(1) / decimal.Decimal(3)),
        [put(context, prec=3), put(context, prec=exact)],
    )


@program
def a_file_in_memory():
    file = io.StringIO("ab")
    return (lambda x: x * len(file.getvalue())), [lambda: file.write("abcd")]


@program
def how_numpy_takes_errors():
    before = np.geterr()["divide"]
    return (
        lambda x: x * 2 if np.geterr()["divide"] == "ignore" else x * 3,
        [lambda: np.seterr(divide="ignore"), lambda: np.seterr(divide=before)],
    )


@program
def anomaly_mode():
    switch = torch.autograd.set_detect_anomaly
    return (lambda x: x * 2 if torch.is_anomaly_enabled() else x * 3), [lambda: switch(True), lambda: switch(False)]


@program
def a_switch_of_a_kernel_library():
    other = torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled)
    return (lambda x: x * 2 if torch.backends.mkldnn.enabled else x * 3), switched(other)


@program
def a_switch_of_cudnn():
    other = torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark)
    return (lambda x: x * 2 if torch.backends.cudnn.benchmark else x * 3), switched(other)


@program
def a_method_by_its_name():
    thing, call = Thing(), operator.methodcaller("scaled", 2)
    return (lambda x: x * call(thing)), [put(thing, scale=5)]


@program
def an_array_of_objects():
    values = np.array([2, "text"], dtype=object)
    return (lambda x: x * values[0]), [item(values, 0, 7)]


@program
def an_option_of_a_function_of_autograd():
    class Scaled(torch.autograd.Function):
        scale = 2

        @staticmethod
        def forward(ctx, x):
            return x * Scaled.scale

        @staticmethod
        def backward(ctx, gradient):
            return gradient * Scaled.scale

    return (lambda x: Scaled.apply(x)), [put(Scaled, scale=5)]


@program
def the_numbers_in_a_tensor():
    weights = torch.tensor([1.0, 2.0])
    return (lambda x: x * sum(weights.tolist())), [lambda: weights.fill_(3.0)]


@program
def a_default_dict():
    table = collections.defaultdict(functools.partial(int, 2))
    return (lambda x: x * table["scale"]), [item(table, "scale", 5)]


@program
def an_iterable_of_the_users():
    class Numbers:
        def __iter__(self):
            return iter(self.numbers)

    numbers = Numbers()
    numbers.numbers = [1, 2]
    return (lambda x: x * sum(numbers)), [lambda: numbers.numbers.append(4)]


@program
def a_method_put_on_an_object():
    thing = Thing()
    return (lambda x: x * thing.scaled(2)), [put(thing, scaled=types.MethodType(lambda self, number: 7, thing))]


def play(name, compiled):
    function, changes = PROGRAMS[name]()
    run = foregrad.compile(function, backend="eager") if compiled else function
    seen = []
    for change in [None, *changes]:
        if change is not None:
            change()
        for _ in range(2):
            x = torch.arange(3.0, requires_grad=True)
            out = run(x)
            seen += [out.detach().clone(), *torch.autograd.grad(out.sum(), x)]
    return seen


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_the_same_as_eager(name):
    eager, compiled = play(name, False), play(name, True)
    assert len(eager) == len(compiled)
    for number, (a, b) in enumerate(zip(eager, compiled, strict=True)):
        assert torch.equal(a, b), f"call {number // 2}"


@pytest.mark.parametrize("read", [lambda x: np.asarray(x).sum(), lambda x: x.numpy().sum()])
def test_numpy_is_refused_by_name(read):
    weights = torch.ones(3)

    def f(x):
        return x * float(read(weights))

    with pytest.raises(foregrad.errors.UnsupportedOpError, match=r"test_library_options.py:\d+"):
        foregrad.compile(f)(torch.ones(3))
