"""Lists that grow from call to call, and whose length or items the function reads: these are inputs of few graphs."""

import collections
import contextlib
import time
import types
import warnings

import pytest
import torch

import foregrad
from foregrad.extend import view
from tests.covering import each

CALLS = 60


def made():
    torch.manual_seed(0)
    return types.SimpleNamespace(losses=[], log={"loss": [], "seen": []}, window=collections.deque(maxlen=6), n=0)


def every_tenth(s, v):
    s.losses.append(v)
    if len(s.losses) % 10 == 0:
        print(f"{len(s.losses)}: {s.losses[-1]:.4f}")


def steps_so_far(s, v):
    step = len(s.losses)
    s.losses.append(v)
    return v / (1 + step)


def mean_of_the_last(s, v):
    s.losses.append(v)
    return sum(s.losses[-5:]) / len(s.losses[-5:])


def mean_of_more(s, v):
    s.losses.append(v)
    return sum(s.losses[-12:]) / 12 if len(s.losses) >= 12 else 0.0


def first_in_first_out(s, v):
    s.losses.append(v)
    if len(s.losses) > 15:
        s.losses.pop(0)
    return len(s.losses)


def drops_half(s, v):
    s.losses.append(v)
    if len(s.losses) > 5:
        s.n += len(s.losses) * s.losses.pop(0)
    return s.losses[0]


def of_a_window(s, v):
    s.window.append(v)
    return sum(s.window) / len(s.window)


def full_window(s, v):
    is_spike = len(s.window) == s.window.maxlen and v > 1.2 * sum(s.window) / len(s.window)
    s.window.append(v)
    return is_spike


def compared_with_the_last(s, v):
    is_worse = bool(s.log["loss"]) and v > s.log["loss"][-1]
    s.log["loss"].append(v)
    s.log["seen"].append(len(s.log["loss"]))
    return is_worse, s.log["loss"][0], s.log["seen"][-1]


def emptied(s, v):
    s.losses.append(v)
    if len(s.losses) == 12:
        s.n += 1
        s.losses = []
    return len(s.losses)


def emptied_in_place(s, v):
    s.losses.append(v)
    if len(s.losses) >= 12:
        s.losses.clear()
    return s.n


def two_before(s, v):
    s.losses.append(v)
    try:
        return v - s.losses[-3]
    except IndexError:
        return None


# (the most graphs, the most eager calls)
PROGRAMS = {
    every_tenth: (4, 0),
    steps_so_far: (3, 0),
    mean_of_the_last: (2, 5),
    mean_of_more: (4, 1),
    first_in_first_out: (4, 0),
    drops_half: (4, 1),
    of_a_window: (2, 7),
    full_window: (4, 8),
    compared_with_the_last: (5, 0),
    emptied: (5, 0),
    emptied_in_place: (5, 0),
    two_before: (4, 3),
}


def run(program, weight, s, door):
    def step(x):
        return (weight * x).sum(), program(s, (weight * x).sum().item())

    step = door(step)
    found = []
    for i in range(CALLS):
        loss, result = step(torch.full((3,), float(i * 7 % 5)) + i)
        loss.backward()
        found.append((loss.item(), result))
    return found, step


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_they_are_inputs(program, capsys):
    weight, s, other, t = torch.ones(3, requires_grad=True), made(), torch.ones(3, requires_grad=True), made()
    expected, _ = run(program, weight, s, lambda step: step)
    printed = capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, compiled = run(
            program, other, t, lambda step: foregrad.compile(step, backend="eager", on_unsupported="eager")
        )
    assert found == expected
    assert capsys.readouterr().out == printed
    assert torch.equal(other.grad, weight.grad)
    assert t == s
    report = foregrad.explain_recompiles(compiled)
    filled = sum(entry.count for entry in compiled.foregrad.recompiles().filling)
    most_graphs, most_eager = PROGRAMS[program]
    assert (len(view(compiled).graphs) <= most_graphs, report.eager_calls + filled <= most_eager) == (True, True)


KINDS = {
    "list": list,
    "deque": collections.deque,
    "window of 6": lambda: collections.deque(maxlen=6),
    "window of 4": lambda: collections.deque([1.0] * 2, maxlen=4),
}


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize(("before", "after"), each(KINDS, KINDS, times=2))
def test_a_container_of_a_different_kind_in_the_place(before, after):
    def results(*, is_compiled):
        state = types.SimpleNamespace(kept=KINDS[before]())

        def function(x):
            state.kept.append(1.5 * len(state.kept))
            scale = 3 if getattr(state.kept, "maxlen", None) == len(state.kept) else 5
            return x * len(state.kept) * scale + (state.kept[-2] if len(state.kept) > 1 else 0)

        call = foregrad.compile(function, backend="eager", on_unsupported="eager") if is_compiled else function
        found = []
        for i in range(16):
            found.append(call(torch.ones(1)).item())
            if i == 8:
                state.kept = KINDS[after]()
        return found, state.kept

    assert results(is_compiled=True) == results(is_compiled=False)


class Timed:
    def __enter__(self, clock=time.perf_counter):
        self.began = clock()

    def __exit__(self, *error):
        return False


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
def test_a_capture_that_is_refused_before_its_run_leaves_the_list_in_its_place():
    state = types.SimpleNamespace(kept=[], timer=contextlib.nullcontext())
    kept = state.kept

    def function(x):
        with state.timer:
            state.kept.append(1.5)
            return x * len(state.kept)

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    for i in range(10):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), i + 1.0))
        if i == 5:
            assert view(compiled).graphs
            state.timer = Timed()
        assert state.kept is kept and type(state.kept) is list
