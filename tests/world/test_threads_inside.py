"""A function that starts a thread runs eagerly by name, before the thread has seen a stand-in."""

from __future__ import annotations

import builtins
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError


def by_a_thread(x):
    out = []
    thread = threading.Thread(target=lambda: out.append(x.sin() * 2))
    thread.start()
    thread.join()
    return out[0] + 1


def by_a_pool(x):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda factor: x * factor, [1, 2])
    return first + second


def by_a_write_of_a_thread(x):
    y = x + 1
    thread = threading.Thread(target=lambda: y.add_(5))
    thread.start()
    thread.join()
    return y * 2


def by_a_value_that_a_thread_reads(x):
    out = []
    thread = threading.Thread(target=lambda: out.append(float(x.sum())))
    thread.start()
    thread.join()
    return x * out[0]


@pytest.mark.parametrize("function", [by_a_thread, by_a_pool, by_a_write_of_a_thread, by_a_value_that_a_thread_reads])
def test_a_function_that_starts_a_thread_runs_eagerly_by_name(function, monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    compiled, x = foregrad.compile(function, backend="eager", on_unsupported="eager"), torch.ones(3)
    with pytest.warns(ForegradWarning, match=rf"calls .* in {function.__name__} "):
        first = compiled(x)
    assert torch.equal(first, function(x))
    assert torch.equal(compiled(x), function(x))
    assert not died
    with pytest.raises(UnsupportedSideEffectError, match="calls"):
        foregrad.capture(function, x)


def test_no_other_thread_sees_what_stands_for_functions_of_numbers():
    functions = {math: ("sqrt", "cos"), builtins: ("min", "max", "id")}
    before = {(module, name): vars(module)[name] for module, names in functions.items() for name in names}
    others, is_over = [], threading.Event()

    def look():
        while not is_over.is_set():
            others.extend(key for key, value in before.items() if vars(key[0])[key[1]] is not value)
            others.extend([] if (math.sqrt(4.0), min(1.0, 2.0), max([3, 4])) == (2.0, 1.0, 4) else ["a result"])

    def f(x, number):
        assert math.sqrt is before[math, "sqrt"]
        return x * math.sqrt(number) + min(number, 2.0)

    compiled = foregrad.compile(f, backend="eager")
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for i in range(6):
            assert compiled(torch.ones(1), i + 0.5).equal(f(torch.ones(1), i + 0.5))
    finally:
        is_over.set()
        thread.join()
    assert not others
    assert len(foregrad.explain_recompiles(compiled)) <= 3
