"""Iterators older than the call: what a call takes from them is gone, so a capture takes nothing."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch
from torch import nn

import foregrad


def numbers():
    count = 0
    while True:
        count += 1
        yield count


MADE = {
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "count": itertools.count,
    "generator": numbers,
    "list": lambda: iter(list(range(50))),
    "zip": lambda: map(operator.itemgetter(0), zip(range(50), range(50), strict=True)),
    "enumerate": lambda: map(operator.itemgetter(0), enumerate(range(50))),
}

TAKE = {
    "next": next,
    "method": lambda it: it.__next__(),
    "loop": lambda it: next(item for item in it),
    "islice": lambda it: sum(itertools.islice(it, 2)),
    "zip": lambda it: sum(item for _, item in zip(range(2), it, strict=False)),
}


class Holder(nn.Module):
    def __init__(self, iterator, take):
        super().__init__()
        self.iterator, self.take = iterator, take
        self.other = iterator  # by two names

    def forward(self, x):
        return x * self.take(self.iterator) + next(self.other)


def in_cell(iterator, take):
    return lambda x: x * take(iterator) + take(iterator)


def in_list(iterator, take):
    items = [iterator, 3]
    return lambda x: (x + 1) * take(items[0])


def in_tuple(iterator, take):
    items = (iterator, 3)
    return lambda x: (x + 1) * take(items[0])


def in_partial(iterator, take):
    return functools.partial(lambda it, x: (x + 1) * take(it), iterator)


def in_default(iterator, take):
    def function(x, it=iterator):
        return (x + 1) * take(it)

    return function


def in_method(iterator, take):
    step = iterator.__next__

    def function(x):
        return (x + 1) * step()

    return function


PLACES = {f.__name__: f for f in (Holder, in_cell, in_list, in_tuple, in_partial, in_default, in_method)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("take", TAKE)
@pytest.mark.parametrize("made", MADE)
def test_what_a_capture_meets_is_not_used_up(made, take, place):
    def run(compiled):
        iterator = MADE[made]()
        function = PLACES[place](iterator, TAKE[take])
        step = foregrad.compile(function, backend="eager", on_unsupported="eager") if compiled else function
        return [step(torch.ones(2)).tolist() for _ in range(4)] + [next(iterator)]

    with pytest.warns(foregrad.errors.ForegradWarning, match="takes from|a source of values that differ each time"):
        got = run(compiled=True)
    assert got == run(compiled=False)


@pytest.mark.parametrize("made", MADE)
def test_an_iterator_among_the_arguments(made):
    def step(x, iterator):
        return x * next(iterator) + next(iterator)

    def run(function):
        iterator = MADE[made]()
        return [function(torch.ones(2), iterator).tolist() for _ in range(3)] + [next(iterator)]

    compiled = foregrad.compile(step, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning):
        got = run(compiled)
    assert got == run(step)


@pytest.mark.parametrize("made", MADE)
def test_an_iterator_that_is_left_alone_is_no_matter(made):
    function = Holder(MADE[made](), lambda it: 1)
    function.forward = lambda x: x * 2
    assert foregrad.compile(function, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]


def test_iterators_of_the_call_itself():
    def step(x):
        items = itertools.count(1)
        return x * next(items) + sum(value * next(items) for value in iter([x, x]))

    compiled = foregrad.compile(step, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == step(torch.ones(2)).tolist()


def test_a_list_that_is_only_reached_by_its_method():
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.push = [].append

        def forward(self, x):
            self.push(x.shape[0])
            return x * 2

    logs = Logs()
    compiled = foregrad.compile(logs, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"self\.push"):
        for rows in (1, 2, 3):
            compiled(torch.ones(rows))
    assert logs.push.__self__ == [1, 2, 3]


def test_the_error_names_the_iterator_and_the_line():
    function = in_list(itertools.count(), next)
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match=r"items\[0\].*test_iterators"):
        foregrad.compile(function, backend="eager")(torch.ones(2))
