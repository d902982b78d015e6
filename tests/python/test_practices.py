"""Practices round training: each as in eager bit for bit, and compiled, or eager with one warning that says why."""

from __future__ import annotations

import random
import re
import warnings

import numpy as np
import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from tests.python import practices


def run(name, wrap):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - programs of users draw from the module itself
    return [*practices.PRACTICES[name](wrap), torch.rand(()), random.random()]


def same(a, b, *, close):
    if isinstance(a, torch.Tensor):
        alike = torch.allclose if close else torch.equal
        return isinstance(b, torch.Tensor) and a.dtype is b.dtype and alike(a, b)
    return a == b


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", practices.PRACTICES)
def test_as_in_eager(name):
    made = []

    def wrap(function):
        made.append(foregrad.compile(function, backend="eager", on_unsupported="eager"))
        return made[-1]

    expected = run(name, lambda function: function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(name, wrap)
    assert len(found) == len(expected)
    pairs, close = enumerate(zip(expected, found, strict=True)), name in practices.CLOSE
    assert [i for i, (a, b) in pairs if not same(a, b, close=close)] == []
    said = [str(w.message) for w in caught if issubclass(w.category, ForegradWarning)]
    eager = sum(foregrad.explain_recompiles(call).eager_calls for call in made)
    assert bool(said) is bool(eager) is (name in practices.EAGER), said
    assert all(re.search(practices.EAGER[name], text) for text in said)


def test_there_are_sixty():
    assert len(practices.PRACTICES) >= 60


@pytest.mark.parametrize("make", [lambda: torch.nn.LazyLinear(3), lambda: torch.nn.LazyBatchNorm1d()])
def test_a_lazy_module_that_is_compiled_itself_is_compiled_once_it_has_parameters(make):
    torch.manual_seed(0)
    module = make()
    compiled = foregrad.compile(module, backend="eager")
    x = torch.randn(4, 2)
    torch.manual_seed(1)
    out = compiled(x)
    torch.manual_seed(1)
    expected = make()
    expected(x)
    assert type(module) is type(expected) is type(compiled).__mro__[1]
    assert torch.equal(compiled.eval()(x), expected.eval()(x))
    assert out.requires_grad
    report = foregrad.explain_recompiles(compiled)
    assert len(report) > 0
    assert report.eager_calls == 0
