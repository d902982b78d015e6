"""A function that starts a thread runs eagerly by name, before the thread has seen a stand-in."""

from __future__ import annotations

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
