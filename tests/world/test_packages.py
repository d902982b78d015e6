"""Functions of installed packages, which a capture goes through when their code begins to run: everything that such a
function reads, writes and draws is as in eager."""

import importlib
import itertools
import random
import sys

import pytest
import torch

import foregrad
from foregrad.python.program_state import ProgramState

_PACKAGE = """
import functools
import random
from random import random as draw
import torch
import foregrad

COUNT = 0
SEEN = []
SCALE = {"of": 2.0}
WEIGHT = torch.ones(3)
WEIGHT.factor = 2.0
NUMBERS = iter(range(100))
STATE = {"n": 0}

class Kept:
    n = 0

def inner_counts():
    global COUNT
    COUNT += 1
    Kept.n += 2

def counts(x):
    inner_counts()
    return x * 2

def inner_appends(x):
    SEEN.append(x.detach())

def appends(x):
    inner_appends(x)
    return x * 3

def inner_draws():
    return draw()

def draws(x):
    return x * inner_draws()

def never_draws(x):
    return x * 2 if x is not None else draws(x)

def draws_by_module(x):
    return x * random.random()

def inner_attribute():
    return WEIGHT.factor

def attribute(x):
    return x * inner_attribute()

def weighs(x):
    return x * WEIGHT

def hook(g):
    return g * SCALE["of"]

def adds_hook(y):
    y.register_hook(hook)

def hooks(x):
    y = x * 1.0
    adds_hook(y)
    return y

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * SCALE["of"]

def scales(x):
    return Scaled.apply(x)

def inner_takes():
    return next(NUMBERS)

def takes(x):
    return x * inner_takes()

def writes_state():
    STATE["n"] += 1

@foregrad.eager_region
def region(x):
    writes_state()
    return x * 2

def calls_region(x):
    return region(x)

@functools.cache
def slow(n):
    return torch.full((3,), float(n))

def cached(x):
    return x * slow(3)

def decorated(function):
    def wrapper(x):
        return function(x) + 1
    return wrapper

@decorated
def first(x):
    SEEN.append(1)
    return x

@decorated
def second(x):
    SEEN.append(2)
    return x

def twice(x):
    return first(x) + second(x)

def swap(module, values, x):
    return torch.func.functional_call(module, values, (x,))
"""

_numbers = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a new copy of the package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    names = []

    def install():
        names.append(f"installed_{next(_numbers)}")
        (folder / f"{names[-1]}.py").write_text(_PACKAGE)
        importlib.invalidate_caches()
        return importlib.import_module(names[-1])

    yield install
    for name in names:
        sys.modules.pop(name, None)


def _state(module):
    seen = [value.tolist() if isinstance(value, torch.Tensor) else value for value in module.SEEN]
    return module.COUNT, module.Kept.n, seen, dict(module.STATE), module.NUMBERS.__reduce__()[1:]


def _between(module, step):
    if step == 2:
        module.SCALE["of"] = 5.0
        module.WEIGHT.factor = 7.0
        module.WEIGHT.mul_(2)


def _train(module, name, wrap):
    function = getattr(module, name)

    def step(x):
        return function(x) + 0.0

    call, seen = wrap(step), []
    random.seed(3)
    for number in range(5):
        x = torch.arange(3.0, requires_grad=True)
        out = call(x)
        out.sum().backward()
        _between(module, number)
        seen.append((out.tolist(), x.grad.tolist(), _state(module), random.random()))
    return seen


_NAMES = "counts appends draws draws_by_module attribute weighs hooks scales takes calls_region cached twice".split()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _NAMES)
def test_a_function_of_an_installed_package_does_what_it_does_in_eager(package, name):
    compiled = _train(package(), name, lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    assert compiled == _train(package(), name, lambda f: f)


@pytest.mark.parametrize("name", ["counts", "appends", "attribute", "weighs", "cached", "twice"])
def test_these_are_compiled(package, name):
    compiled = foregrad.compile(getattr(package(), name), backend="eager", on_unsupported="raise")
    for _ in range(3):
        compiled(torch.ones(3))
    assert 1 <= len(compiled.foregrad.graphs.specializations) <= 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_package_swaps_a_modules_parameters_for_arguments_that_are_these_parameters(package, tied):
    swap = package().swap
    net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    if tied:
        net[1].weight = net[0].weight
    values, x = dict(net.named_parameters()), torch.ones(2, 3)

    def step(values, x):
        return swap(net, values, x).sum()

    expected = torch.autograd.grad(step(values, x), list(values.values()))
    found = torch.autograd.grad(foregrad.compile(step, backend="eager")(values, x), list(values.values()))
    assert all(map(torch.equal, found, expected))


def test_a_walk_leaves_functions_of_packages_that_do_not_run(package):
    module = package()

    def step(x):
        return module.counts(x)

    whole, partial = ProgramState([(step, "step")]), ProgramState([(step, "step")], is_whole=False)
    assert whole.knows(module.Kept) and not partial.has_met(module.Kept)
    partial.enter(module.counts.__code__)
    assert not partial.has_met(module.Kept)
    partial.enter(module.inner_counts.__code__)
    assert partial.has_met(module.Kept)


def test_an_object_unknown_to_a_partial_walk_is_looked_for_in_a_whole_one(package):
    module = package()
    partial = ProgramState([(module.counts, "counts")], is_whole=False)
    assert not partial.has_met(module.Kept) and partial.knows(module.Kept)
    assert not partial.knows(object())


class _Result:
    def __init__(self, value):
        self.value = value


def test_a_function_that_draws_is_in_its_place_again_where_it_is_found_after_the_call(package):
    module = package()

    def step(x):
        return _Result(module.never_draws(x))

    result = foregrad.compile(step, backend="eager", on_unsupported="raise")(torch.ones(3, requires_grad=True))
    assert result.value.tolist() == [2.0, 2.0, 2.0]
    assert module.draw is module.random.random
