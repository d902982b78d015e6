"""Python's arithmetic on numbers that vary raises where eager's does, and handlers in the function see the error."""

import math
import types

import pytest
import torch

import foregrad
from tests.covering import each


def divides(state, x, k):
    try:
        ratio = 10 / (k - 5)
    except ZeroDivisionError:
        return x
    return x * 2 if ratio > 1 else x * ratio


def divides_whole(state, x, k):
    try:
        return x * (10 // (k - 5))
    except ZeroDivisionError:
        return x


def takes_remainders(state, x, k):
    try:
        return x * (10 % (k - 5))
    except ZeroDivisionError:
        return x


def divides_by_state(state, x, k):
    state.n += 1
    try:
        ratio = 10 / (state.n - 5)
    except ZeroDivisionError:
        ratio = 0.5
    return x * 2 if ratio > 1 else x * ratio


def takes_logarithms(state, x, k):
    try:
        return x * math.log(k - 4)
    except ValueError:
        return x * 0.25


def takes_powers(state, x, k):
    try:
        return x * (k - 5) ** -1
    except ZeroDivisionError:
        return x


def reads_a_sum(state, x, k):
    try:
        return x / (1 / (x.sum() * (k - 5)).item())
    except ZeroDivisionError:
        return x


def catches_nothing(state, x, k):
    state.n += 1
    return x * (10 / (k - 5)) + state.n


FUNCTIONS = [
    divides, divides_whole, takes_remainders, divides_by_state, takes_logarithms, takes_powers, reads_a_sum,
    catches_nothing,
]  # fmt: skip


def results(function, numbers, *, is_compiled):
    state = types.SimpleNamespace(n=0)

    def program(x, k):
        return function(state, x, k)

    call = foregrad.compile(program, backend="eager", on_unsupported="eager") if is_compiled else program
    found = []
    for number in numbers:
        try:
            found.append(call(torch.full((2,), 0.5), number).tolist())
        except (ZeroDivisionError, ValueError) as error:
            found.append(repr(error))
    return found, state.n


NUMBERS = {"up": range(12), "down": range(11, -1, -1), "again": [5, 6, 7, 8, 5, 9, 5]}


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize(("function", "kind", "way"), each(FUNCTIONS, [int, float], NUMBERS, times=2))
def test_errors_and_handlers_are_eagers(function, kind, way):
    numbers = [*map(kind, NUMBERS[way])]
    assert results(function, numbers, is_compiled=True) == results(function, numbers, is_compiled=False)
