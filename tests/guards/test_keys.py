"""An argument that the program also finds as a key, an item of a set or behind a weak reference is that very object."""

from __future__ import annotations

import collections
import operator
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.weak import WeakIdKeyDictionary

import foregrad


def new(value=1.0):
    return nn.Parameter(torch.tensor([value, 2.0]))


def in_a_set(known, _):
    members = {known}
    return lambda p: p * 2 if p in members else p * 3


def in_a_frozenset(known, _):
    members = frozenset({known})
    return lambda p: p * 2 if p in members else p * 3


def in_a_set_of_an_object(known, _):
    holder = collections.UserDict(frozen={known})
    return lambda p: p * 2 if p in holder.data["frozen"] else p * 3


def in_a_set_that_the_call_makes(known, _):
    params = [known]
    return lambda p: p * 2 if p in set(params) else p * 3


def by_get(known, _):
    rates = {known: 5.0}
    return lambda p: p * rates.get(p, 1.0)


def by_item(known, other):
    rates = {known: 5.0, other: 7.0}
    return lambda p: p * rates[p]


def by_an_error(known, _):
    rates = {known: 5.0}

    def function(p):
        try:
            return p * rates[p]
        except KeyError:
            return p * 9

    return function


def in_a_tuple_that_is_a_key(known, _):
    rates = {(known, "rate"): 5.0}
    return lambda p: p * rates.get((p, "rate"), 1.0)


def in_a_table_that_the_call_makes(known, _):
    return lambda p: p * {known: 5.0}.get(p, 1.0)


def by_a_weak_key(known, _):
    rates = WeakIdKeyDictionary()
    rates[known] = 5.0
    return lambda p: p * rates.get(p, 1.0)


def behind_a_weak_reference(known, _):
    reference = weakref.ref(known)
    return lambda p: p * 2 if p is reference() else p * 3


def among_the_items_of_a_set(known, _):
    members = {known}
    return lambda p: p * 2 if any(p is member for member in members) else p * 3


def in_a_tuple(known, _):
    params = (known,)
    return lambda p: p * 2 if any(p is member for member in params) else p * 3


def by_a_function_of_operator(known, _):
    params = [known]
    return lambda p: p * 2 if any(operator.is_(p, member) for member in params) else p * 3


def by_a_difference_of_sets(known, _):
    frozen = {known}
    return lambda p: sum({p} - frozen, p * 0)


def reached_in_both_ways(known, _):
    rates = {known: 5.0}
    return lambda p: p * rates.get(p, 1.0) + known * rates[known]


LOOKUPS = [
    in_a_set,
    in_a_frozenset,
    in_a_set_of_an_object,
    in_a_set_that_the_call_makes,
    by_get,
    by_item,
    by_an_error,
    in_a_tuple_that_is_a_key,
    in_a_table_that_the_call_makes,
    by_a_weak_key,
    behind_a_weak_reference,
    among_the_items_of_a_set,
    in_a_tuple,
    by_a_function_of_operator,
    by_a_difference_of_sets,
    reached_in_both_ways,
]


def results(wrap, make, order):
    params = new(), new()
    function, found = wrap(make(*params)), []
    for number in order:
        result = function(params[number])
        params[number].grad = None
        result.sum().backward()
        found += [result.detach(), params[number].grad]
    return found


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1, 0)], ids=["known first", "other first"])
@pytest.mark.parametrize("make", LOOKUPS, ids=lambda f: f.__name__)
def test_each_call_finds_what_eager_finds(make, order):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none runs eagerly
        compiled = results(lambda f: foregrad.compile(f, backend="eager"), make, order)
    assert all(map(torch.equal, compiled, results(lambda f: f, make, order)))


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)], ids=["known first", "other first"])
def test_keys_of_a_dict_among_the_arguments(order):
    def function(p, rates):
        return p * rates.get(p, 1.0)

    compiled, params = foregrad.compile(function, backend="eager"), (new(), new())
    for number in order:
        for rates in ({params[0]: 2.0}, {params[1]: 3.0}, {}):
            assert torch.equal(compiled(params[number], rates), function(params[number], rates))


def test_a_frozen_parameter_is_not_trained():
    model = nn.Linear(2, 2, bias=False)
    frozen, other, gradient = {model.weight}, nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)

    @torch.no_grad()
    def step(p):
        if p not in frozen:
            p.sub_(gradient)

    compiled, before = foregrad.compile(step, backend="eager"), model.weight.detach().clone()
    for p in (other, model.weight, other, model.weight):
        compiled(p)
    assert torch.equal(model.weight, before)
    assert torch.equal(other, torch.full((2, 2), -1.0))


def steps(wrap, count):
    params, state = [new(float(i)) for i in range(count)], collections.defaultdict(dict)

    @torch.no_grad()
    def update(p, gradient):
        own = state[p]
        if "momentum" not in own:
            own["momentum"] = torch.zeros_like(p)
        own["momentum"].mul_(0.9).add_(gradient)
        p.sub_(own["momentum"])

    step = wrap(update)
    for _ in range(4):
        for p in params:
            step(p, torch.ones(2))
    return params, step


@pytest.mark.filterwarnings("ignore:`update` changes the number of items in state in this call")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_state_by_parameter_is_compiled_once_it_is_there(count):
    params, step = steps(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"), count)
    assert all(map(torch.equal, params, steps(lambda f: f, count)[0]))
    assert len(step.foregrad.specializations) == count


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)], ids=["known first", "other first"])
def test_a_wrapper_is_told_apart_eagerly_by_name(order):
    params = [TwoTensor(torch.ones(2), torch.ones(2)) for _ in range(2)]
    members = {params[0]}

    def function(p):
        return p * 2 if p in members else p * 3

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="compares tensors by identity"):
        found = [compiled(params[number]).a for number in order]
    assert all(map(torch.equal, found, [function(params[number]).a for number in order]))


def test_behind_dynamo_an_argument_is_what_it_is_with_pytorchs_own_backend():
    def run(**how):
        torch._dynamo.reset()
        known, other = new(), new()
        rates = {known: 5.0}
        call = torch.compile(lambda p: p * rates.get(p, 1.0), **how)
        return [call(p).tolist() for p in (known, other, known)]

    assert run(backend="foregrad", options={"backend": "eager"}) == run(backend="aot_eager")


def test_another_tensor_becomes_the_key():
    known, other, x = new(), new(), torch.ones(2)
    rates = {known: 5.0}

    def function(x):
        return x * rates.get(known, 1.0)

    compiled = foregrad.compile(function, backend="eager")
    assert torch.equal(compiled(x), x * 5)
    del rates[known]
    rates[other] = 5.0
    assert torch.equal(compiled(x), x)


def test_a_list_has_another_tensor_than_the_set():
    known, other, x = new(), new(3.0), torch.ones(2)
    members, params = {known}, [known]

    def function(x):
        return x * params[0] * (2.0 if params[0] in members else 3.0)

    compiled = foregrad.compile(function, backend="eager")
    assert torch.equal(compiled(x), function(x))
    params[0] = other
    assert torch.equal(compiled(x), function(x))


def test_a_value_by_a_weak_key_changes():
    known, rates, x = new(), WeakIdKeyDictionary(), torch.ones(2)
    rates[known] = 5.0
    compiled = foregrad.compile(lambda x: x * rates[known], backend="eager")
    assert torch.equal(compiled(x), x * 5)
    rates[known] = 7.0
    assert torch.equal(compiled(x), x * 7)


def test_keys_are_used_without_a_warning():
    rates, x = {new(): 2.0}, torch.ones(2)

    def function(x):
        return x + sum(p * rate for p, rate in rates.items())

    assert torch.equal(foregrad.compile(function, backend="eager")(x), function(x))


@pytest.mark.parametrize("kind", [dict.fromkeys, set])
def test_a_class_that_is_a_key_is_written_to_in_each_call(kind):
    counted = kind([type("Counted", (), {"calls": 0})])

    def count(x):
        for cls in counted:
            cls.calls += 1
        return x * 2

    compiled = foregrad.compile(count, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    assert [cls.calls for cls in counted] == [3]
