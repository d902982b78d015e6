"""Logging handlers of the program's own: they run in each compiled call, unless call and handler share state."""

import logging
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning

STATE, SEEN = {"step": 0, "handled": 0}, []
TOTAL = 0


class Keeping(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Reading(Keeping):
    def emit(self, record):
        self.lines.append((STATE["step"], record.getMessage()))


class Counting(Keeping):
    def emit(self, record):
        STATE["handled"] += 1


class Summing(Keeping):
    def emit(self, record):
        global TOTAL
        TOTAL += 1


class Formatting(logging.Formatter):
    def format(self, record):
        return f"{STATE['step']} {record.getMessage()}"


class Formatted(Keeping):
    def __init__(self):
        super().__init__()
        self.setFormatter(Formatting())

    def emit(self, record):
        self.lines.append(self.format(record))


LOGGER = logging.getLogger("tests.python.handlers")
HANDLER = Keeping()


def counts_before(x):
    STATE["step"] += 1
    LOGGER.info("loss %f", x.sum().item())
    return x * STATE["step"]


def counts_after(x):
    LOGGER.info(f"loss {x.sum().item():.2f}")  # noqa: G004
    STATE["step"] += 1
    SEEN.append(x.sum().item())
    return x * 2


def adds_to_the_count(x):
    LOGGER.info("hello")
    STATE["handled"] += 1
    return x * STATE["handled"]


def reads_the_handler(x):
    LOGGER.info("hello")
    return x * len(HANDLER.lines)


def reads_a_global(x):
    LOGGER.info("hello")
    return x * TOTAL


def told(function, handler, calls=8):
    global TOTAL
    TOTAL = 0
    STATE.update(step=0, handled=0)
    SEEN.clear()
    LOGGER.handlers, LOGGER.propagate, LOGGER.level = [handler], False, logging.INFO
    LOGGER.manager._clear_cache()
    results = [function(torch.full((2,), 0.5 * i)).tolist() for i in range(calls)]
    lines = [*handler.lines]
    handler.lines.clear()
    return results, lines, dict(STATE), [*SEEN], TOTAL


@pytest.mark.parametrize("function", [counts_before, counts_after])
def test_a_handler_beside_a_counter_needs_few_graphs(function):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    found, expected = told(compiled, Keeping()), told(function, Keeping())
    assert found == expected
    assert len(found[1]) == 8
    assert len(compiled.foregrad.compilations) <= 4


@pytest.mark.parametrize(
    ("function", "handler"),
    [
        (counts_before, Reading),
        (counts_after, Reading),
        (counts_before, Formatted),
        (adds_to_the_count, Counting),
        (reads_the_handler, lambda: HANDLER),
        (reads_a_global, Summing),
    ],
)
def test_a_handler_that_shares_state_with_the_call_is_eager_by_name(function, handler):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="code of a handler can get at"):
        found = told(compiled, handler())
    assert found == told(function, handler())


def test_behind_dynamo_the_handler_hears_of_each_call():
    torch._dynamo.reset()
    compiled = torch.compile(counts_after, backend="foregrad", options={"backend": "eager"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert told(compiled, Keeping(), calls=4) == told(counts_after, Keeping(), calls=4)
