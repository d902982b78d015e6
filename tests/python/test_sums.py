"""`sum`, `min`, `max` and `fsum` of numbers that a graph computes: one graph; `sum` rounds as Python's does."""

import collections
import math
import random
import statistics
import types

import numpy as np
import pytest
import torch

import foregrad


def of_a_generator(state, x):
    return x * sum(value.item() for value in x)


def of_a_list(state, x):
    return x * sum([value.item() for value in x])


def from_a_start(state, x):
    return x * sum([value.item() for value in x], 0.1)


def beside_integers(state, x):
    return x * sum([1, x[0].item(), 2, x[1].item(), x[2].item()])


def of_a_window(state, x):
    state.kept.append(x.sum().item())
    return x * sum(state.kept[-4:])


def of_tensors(state, x):
    return x * sum([*x, 0.5])


def the_largest(state, x):
    return x * max(value.item() for value in x) - max((float(value) for value in x), default=0.0)


def the_least(state, x):
    return x * min(abs(value.item()) for value in x)


def an_exact_sum(state, x):
    return x * math.fsum([value.item() for value in x])


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize(
    "function",
    [
        of_a_generator,
        of_a_list,
        from_a_start,
        beside_integers,
        of_a_window,
        of_tensors,
        the_largest,
        the_least,
        an_exact_sum,
    ],
)
def test_a_sum_rounds_as_pythons(function):
    drawn = random.Random(0)
    given = [torch.tensor([drawn.gauss(0, 1) * 10 ** drawn.randint(-8, 8) for _ in range(4)]) for _ in range(25)]

    def results(*, is_compiled):
        state = types.SimpleNamespace(kept=[])

        def program(x):
            return function(state, x)

        call = foregrad.compile(program, backend="eager", on_unsupported="eager") if is_compiled else program
        return [call(x.double()).tolist() for x in given], call

    (expected, _), (found, call) = results(is_compiled=False), results(is_compiled=True)
    assert found == expected
    assert len(foregrad.explain_recompiles(call)) <= 2


OF_LISTS = {
    "np.mean": lambda kept, x: np.mean([value.item() for value in x]),
    "np.mean of a window": lambda kept, x: kept.append(x.sum().item()) or np.mean(kept),
    "np.std of a list of lists' row": lambda kept, x: np.std(x.tolist()),
    "np.std by an option": lambda kept, x: float(np.std([value.item() for value in x], ddof=1)),
    "np.percentile": lambda kept, x: np.percentile([value.item() for value in x], 50),
    "np.isnan": lambda kept, x: np.isnan(x.sum().item()),
    "np.isfinite": lambda kept, x: 1.0 if np.isfinite(x.log().sum().item()) else 2.0,
    "np.max beside a number": lambda kept, x: np.max((x[0].item(), 0.5)),
    "statistics.mean": lambda kept, x: statistics.mean(value.item() for value in [*x]),
    "statistics.mean of a window": lambda kept, x: kept.append(x.sum().item()) or statistics.mean([*kept]),
    "statistics.stdev": lambda kept, x: statistics.stdev([value.item() for value in x] + [1]),
    "a scaled loss": lambda kept, x: x * np.mean([value.item() for value in x]) + np.mean([1.0, 2.0]),
    "kept": lambda kept, x: kept.append(np.mean([value.item() for value in x])) or x,
}


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("name", OF_LISTS)
def test_functions_of_lists_are_one_operation(name):
    def run(wrap):
        kept = collections.deque(maxlen=3)
        call = wrap(lambda x: OF_LISTS[name](kept, x))
        torch.manual_seed(0)
        found = [*(call(torch.randn(3)) for _ in range(16)), *kept]
        return call, [(type(one), one.tolist() if hasattr(one, "tolist") else one) for one in found]

    call, found = run(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    assert found == run(lambda f: f)[1]
    if name != "statistics.mean":  # of a generator: not looked into
        report = foregrad.explain_recompiles(call)
        assert len(report) <= 2
        assert report.eager_calls <= 2


def _hashed(numbers):
    try:
        return {*numbers}
    except TypeError:
        return "no hash"


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("function", [repr, _hashed, lambda numbers: repr(numbers[0]), lambda numbers: len({*numbers})])
def test_integers_that_the_call_reads_have_the_text_and_hash_of_an_integer(function):
    def program(x):
        return function((x * 2).tolist())

    call = foregrad.compile(program, backend="eager", on_unsupported="eager")
    for _ in range(12):
        x = torch.randint(2, 5, (3,))
        assert call(x) == program(x)
