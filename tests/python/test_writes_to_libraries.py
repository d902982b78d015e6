"""A call that sets something of a library's is eager by name: no symbol is left there, and none is set but once."""

import collections
import json
import math
import sys
import threading
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError

LINEAR, EVENT = nn.Linear(2, 2), threading.Event()
HANDLE = torch.utils.hooks.RemovableHandle(collections.OrderedDict())


def on_a_module(size):
    torch.foregrad_test = size


def on_the_standard_library(size):
    math.foregrad_test = size


def on_a_module_in_a_module(size):
    torch.nn.functional.foregrad_test = size


def on_a_package_in_a_package(size):
    json.decoder.foregrad_test = size


def on_a_class(size):
    nn.Linear.foregrad_test = size


def on_the_class_of_an_object(size):
    type(LINEAR).foregrad_test = size


def on_a_class_of_the_standard_library(size):
    collections.Counter.foregrad_test = size


def on_a_function(size):
    torch.nn.functional.relu.foregrad_test = size


def on_an_object_of_pytorch(size):
    HANDLE.foregrad_test = size


def on_an_object_of_the_standard_library(size):
    EVENT.foregrad_test = size


def by_setattr(size):
    setattr(torch.utils, "foregrad_test", size)  # noqa: B010 - another instruction


def under_another_name(size):
    module = np
    module.foregrad_test = size


def in_its_table(size):
    vars(json)["foregrad_test"] = size


def in_its_dict(size):
    json.decoder.__dict__["foregrad_test"] = size


PLACES = {
    in_its_table: json,
    in_its_dict: json.decoder,
    on_a_module: torch,
    on_the_standard_library: math,
    on_a_module_in_a_module: torch.nn.functional,
    on_a_package_in_a_package: json.decoder,
    on_a_class: nn.Linear,
    on_the_class_of_an_object: nn.Linear,
    on_a_class_of_the_standard_library: collections.Counter,
    on_a_function: torch.nn.functional.relu,
    on_an_object_of_pytorch: HANDLE,
    on_an_object_of_the_standard_library: EVENT,
    by_setattr: torch.utils,
    under_another_name: np,
}


@pytest.mark.parametrize("put", PLACES, ids=lambda put: put.__name__)
def test_is_set_by_each_call(put):
    def function(x):
        put(x.shape[0])
        return x * 2

    place = PLACES[put]
    call = foregrad.compile(function, backend="eager", on_unsupported="eager")
    try:
        with pytest.warns(ForegradWarning, match=r"sets .*foregrad_test \(of a library\)"):
            call(torch.ones(2))
        for size in (3, 4, 3):
            assert call(torch.ones(size)).tolist() == [2.0] * size
            assert type(place.foregrad_test) is int
            assert place.foregrad_test == size
        assert not call.foregrad.specializations
    finally:
        del place.foregrad_test


def test_is_taken_back_when_it_is_refused():
    def function(x):
        math.tau = 2.0
        return x * 2

    before = math.tau
    with pytest.raises(UnsupportedSideEffectError, match=r"sets math\.tau"):
        foregrad.capture(function, torch.ones(2))
    assert math.tau == before


def test_what_is_set_to_what_it_was_is_no_write():
    def function(x):
        sys.foregrad_test = 1
        try:
            return x * sys.foregrad_test
        finally:
            del sys.foregrad_test

    call = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForegradWarning)
        assert call(torch.ones(2)).tolist() == [1.0, 1.0]
    assert len(call.foregrad.specializations) == 1


def test_a_loader_of_data_is_gone_through_by_each_call():
    data = torch.utils.data.TensorDataset(torch.arange(4.0))

    def function(x):
        for (part,) in torch.utils.data.DataLoader(data, batch_size=2):
            x = x + part.sum()
        return x

    call = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="DataLoader|dataloader") as warned:
        assert call(torch.zeros(1)).item() == 6.0
        data.tensors = (torch.ones(4),)
        assert call(torch.zeros(1)).item() == 4.0
    assert len(warned) == 1


def test_a_module_put_among_all():
    """The call that captures puts it there once, and so does each call after it."""
    put = []

    def function(x):
        module = sys.modules["foregrad_test"] = types.ModuleType("foregrad_test")
        put.append(module)
        return x * 2

    call = foregrad.compile(function, backend="eager", on_unsupported="eager")
    try:
        with pytest.warns(ForegradWarning, match=r"sets sys.modules.foregrad_test \(of a library\)"):
            call(torch.ones(2))
        for _ in range(2):
            call(torch.ones(2))
        assert len(put) == 3
        assert sys.modules["foregrad_test"] is put[-1]
    finally:
        sys.modules.pop("foregrad_test", None)
