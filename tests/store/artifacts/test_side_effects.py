"""What a call leaves behind in Python is no part of an artifact: `export` refuses it by the name of the place."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import UnsupportedSideEffectError
from tests.store.artifacts.through_a_file import loaded_again

CALLS = 0


class Shared:
    calls = 0


class Module(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count, self.mode, self.flag, self.table, self.items = 0, "fresh", False, {"k": 1}, []
        object.__setattr__(self, "act", act)

    def forward(self, x):
        self.act(self)
        return self.linear(x) * (self.count + 1)


def counter(module):
    module.count += 1


def only_written(module):
    module.mode = "used"


def branch_on_a_switch(module):
    module.flag = not module.flag


def item_of_a_dict(module):
    module.table["k"] += 1


def new_item_of_a_dict(module):
    module.table["new"] = 1


def appended_number(module):
    module.items.append(1)


def removed(module):
    del module.flag


def class_attribute(module):
    Shared.calls += 1


def global_variable(module):
    global CALLS
    CALLS += 1


def mode(module):
    module.linear.train(False)


def hook(module):
    module.linear.register_forward_hook(lambda *_: None)


WRITES = {
    counter: "self.count",
    only_written: "self.mode",
    branch_on_a_switch: "self.flag",
    item_of_a_dict: "self.table['k']",
    new_item_of_a_dict: "self.table",
    appended_number: "self.items",
    removed: "self.flag",
    class_attribute: "Shared.calls",
    global_variable: "CALLS",
    mode: "training",
    hook: "_forward_hooks",
}


@pytest.mark.parametrize("act", WRITES, ids=lambda act: act.__name__)
def test_writes_are_refused_by_their_place(act):
    module = Module(act)
    before = dict(vars(module)), dict(module.table), list(module.items), Shared.calls, CALLS
    with pytest.raises(UnsupportedSideEffectError) as found:
        foregrad.export(module, (torch.ones(2, 3),))
    assert WRITES[act] in str(found.value)
    assert (dict(vars(module)), module.table, module.items, Shared.calls, CALLS) == before
    assert module.linear.training
    assert not module.linear._forward_hooks


def test_a_variable_of_an_enclosing_function():
    count = 0

    def f(x):
        nonlocal count
        count += 1
        return x * count

    with pytest.raises(UnsupportedSideEffectError, match="writes count"):
        foregrad.export(f, (torch.ones(2),))
    assert count == 0


DRAWS = {
    "random.random": lambda x: x * random.random(),
    "numpy.random.rand": lambda x: x * float(np.random.rand()),  # noqa: NPY002
    "time.time": lambda x: x * time.time(),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("take", [foregrad.capture, lambda f, x: foregrad.export(f, (x,))], ids=["capture", "export"])
def test_numbers_that_differ_from_call_to_call(name, take):
    with pytest.raises(UnsupportedSideEffectError, match=rf"draws from {name}; .*Draw before the call"):
        take(DRAWS[name], torch.ones(2))


def test_settings_that_are_left_changed():
    def f(x):
        torch.set_grad_enabled(False)
        return x * 2

    with pytest.raises(UnsupportedSideEffectError, match="leave grad mode"):
        foregrad.export(f, (torch.ones(2),))
    assert torch.is_grad_enabled()


def test_what_only_the_first_call_writes():
    class Lazy(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(3.0)
                self.built = True
            return x * self.table

    module = Lazy()
    with pytest.raises(UnsupportedSideEffectError):
        foregrad.export(module, (torch.ones(3),))
    module(torch.ones(3))
    loaded = loaded_again(foregrad.export(module, (torch.ones(3),)))
    assert loaded(torch.ones(3)).tolist() == [0.0, 1.0, 2.0]


def test_a_named_region_of_a_profiler_is_left_out():
    def f(x):
        with torch.profiler.record_function("the sine"):
            y = x.sin()
        return y * 2

    artifact = foregrad.export(f, (torch.ones(2),))
    assert artifact.specializations[0].signature.stops.checks == ()
    assert torch.equal(loaded_again(artifact)(torch.ones(2)), f(torch.ones(2)))
