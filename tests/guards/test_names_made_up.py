"""An attribute asked for under a name that is made at run time may be nowhere yet: it may come to the object, the
thread or the class later.
"""

import threading

import pytest
import torch

import foregrad
from tests.covering import each

LETTER = "e"
OPTIONS = ["scale", "rate"]


class Plain:
    level = 1.0


class Slots:
    __slots__ = ("level", "scale")


class OfThread(threading.local):
    depth = 2.0


class Net(torch.nn.Module):
    level = 1.0


def some():
    pass


def options_of(value, names):
    return sum(getattr(value, name, 1.0) for name in names)


def looped(value):
    def call(x):
        names = "scale", "rate"
        return x * sum(getattr(value, name, 1.0) for name in names)

    return call


def by_a_table(value):
    table = {"scale": 1.0, "rate": 2.0}
    return lambda x: x * sum(getattr(value, name, default) for name, default in table.items())


WAYS = {
    "in a generator": looped,
    "in a function": lambda value: lambda x: x * options_of(value, ("scale", "rate")),
    "a global list": lambda value: lambda x: x * options_of(value, OPTIONS),
    "the keys of a dict": by_a_table,
    "a text put together": lambda value: lambda x: x * getattr(value, "scal" + LETTER, 1.0),
    "asked whether it is there": lambda value: lambda x: x * 2 if hasattr(value, "scal" + LETTER) else x,
}
OWNERS = {
    "object": Plain,
    "slots": Slots,
    "object of a thread": threading.local,
    "object of a thread, of a class": OfThread,
    "module": Net,
    "function": lambda: some,
    "class": lambda: type("Config", (), {"level": 1.0}),
}


CASES = [(owner, "own") for owner in OWNERS]
CASES += [(owner, "class") for owner in ("object", "object of a thread, of a class", "module")]


@pytest.mark.parametrize(("case", "way"), each(CASES, WAYS, times=3))
def test_an_attribute_that_appears_is_seen(case, way):
    owner, where = case
    value = OWNERS[owner]()
    if where == "class":
        value = type("Derived", (type(value),), {})()
    target = type(value) if where == "class" else value
    call = WAYS[way](value)
    compiled, x = foregrad.compile(call, backend="eager"), torch.ones(2)
    try:
        for _ in range(3):
            assert torch.equal(compiled(x), call(x))
        assert len(foregrad.explain_recompiles(compiled)) == 1
        target.scale = 5.0
        for _ in range(2):
            assert torch.equal(compiled(x), call(x))
        del target.scale
        assert torch.equal(compiled(x), call(x))
    finally:
        vars(some).clear()
    report = foregrad.explain_recompiles(compiled)
    assert len(report) <= 3
    assert not report.eager


def test_what_each_thread_has_of_its_own_under_made_up_names():
    own = threading.local()

    def call(x):
        own.calls = getattr(own, f"{LETTER}calls"[1:], 0) + 1
        return x * getattr(own, "scal" + LETTER, 1.0)

    compiled, x, results = foregrad.compile(call, backend="eager"), torch.ones(2), []

    def in_thread(scale):
        own.scale = scale
        results.extend(compiled(x)[0].item() for _ in range(3))
        results.append(own.calls)

    for scale in (2.0, 3.0):
        thread = threading.Thread(target=in_thread, args=(scale,))
        thread.start()
        thread.join()
    assert results == [2.0, 2.0, 2.0, 3, 3.0, 3.0, 3.0, 3]
    assert [compiled(x)[0].item() for _ in range(3)] == [1.0, 1.0, 1.0]
    assert own.calls == 3
