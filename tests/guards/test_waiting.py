"""Functions that wait for other threads, which capture, compile and call compiled functions meanwhile."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

import foregrad
from foregrad import locks

PATIENCE_S = 60  # a deadlock, not a slow machine

pytestmark = pytest.mark.usefixtures("captures_may_wait")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE_S", 0.2)


def in_thread(work):
    """What work() gives on another thread, waited for by this one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "the other thread does not come to its end"
    return found[0]


def new(scale=1.0):
    return foregrad.compile(lambda x: (x * scale).cos(), backend="eager")


def second_derivative(compiled):
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)[0]


WORK = {
    "first call": lambda: new()(torch.ones(3)),
    "backward": lambda: torch.autograd.grad(new()(x := torch.ones(3, requires_grad=True)).sum(), x),
    "second derivative": lambda: second_derivative(new()),
    "vmap": lambda: torch.func.vmap(new())(torch.ones(2, 3)),
    "jvp": lambda: torch.func.jvp(new(), (torch.ones(3),), (torch.ones(3),)),
    "capture": lambda: foregrad.capture(torch.sin, torch.ones(3)),
    "torch.compile": lambda: torch.compile(torch.sin, backend="foregrad", options={"backend": "eager"})(torch.ones(3)),
    "past the limit": lambda: past_the_limit(lambda x, k: x * k),
}


def past_the_limit(function):
    with foregrad.config.override(recompile_limit=1):
        compiled = foregrad.compile(function, backend="eager")
    return [compiled(torch.ones(3), k) for k in range(3)][-1]


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("name", WORK)
def test_a_captured_function_that_waits_for_another_thread(name):
    def function(x):
        in_thread(WORK[name])
        return x * 2

    assert torch.equal(foregrad.compile(function, backend="eager")(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("name", WORK)
def test_a_function_past_the_limit_that_waits_for_another_thread(name):
    waited = []

    def function(x, k):
        if k == 2:
            waited.append(in_thread(WORK[name]))
        return x * k

    assert torch.equal(past_the_limit(function), torch.full((3,), 2.0))
    assert len(waited) == 1


def test_a_captured_function_that_waits_for_a_call_of_itself():
    """The other thread does not wait for long: it runs eagerly."""
    waited = []

    def function(x):
        if not waited:
            waited.append(None)
            waited[0] = in_thread(lambda: compiled(torch.ones(4)))
        return x * 2

    compiled = foregrad.compile(function, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(waited[0], torch.full((4,), 2.0))


def test_a_cache_filled_while_another_thread_calls():
    """A call that fills a cache runs eagerly, with no lock held."""
    cache = {}
    other = new(2.0)

    def function(x):
        if "made" not in cache:
            cache["made"] = x * 2
            in_thread(lambda: other(torch.ones(3)))
        return cache["made"] + x

    compiled = foregrad.compile(function, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


def test_waiting_for_a_backend_has_no_limit(monkeypatch):
    """What waits for Inductor runs no code of the user's; so those who wait for it get what it compiles."""
    turn, inside, results = locks.Turn(), threading.Event(), []

    def hold():
        with turn.taken(), locks.without_user_code():
            inside.set()
            done.wait(PATIENCE_S)

    def wait():
        with turn.taken() as is_ours:
            results.append(is_ours)

    done = threading.Event()
    holder, waiter = threading.Thread(target=hold), threading.Thread(target=wait)
    holder.start()
    inside.wait(PATIENCE_S)
    waiter.start()
    waiter.join(0.6)
    assert not results
    done.set()
    waiter.join(PATIENCE_S)
    holder.join(PATIENCE_S)
    assert results == [True]


def test_fake_modes_of_two_threads_at_once_leave_no_flag_set():
    """Entered one inside the other, and left in the order in which they were entered."""
    from torch.utils import _python_dispatch

    from foregrad._torch.fakes import NewFakeMode

    second_is_in, first_is_out = threading.Event(), threading.Event()

    def inside():
        with NewFakeMode():
            second_is_in.set()
            assert first_is_out.wait(PATIENCE_S)

    before = _python_dispatch.is_in_torch_dispatch_mode(), _python_dispatch.is_in_torch_dispatch_mode(False)
    thread = threading.Thread(target=inside)
    with NewFakeMode():
        thread.start()
        assert second_is_in.wait(PATIENCE_S)
    first_is_out.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert before == (
        _python_dispatch.is_in_torch_dispatch_mode(),
        _python_dispatch.is_in_torch_dispatch_mode(False),
    )


def test_captures_of_two_threads_at_once_leave_nothing_on():
    """Both are inside at the same time, and leave in the order in which they came."""
    # Of an event, who waits for it is a state that guards look at, and another thread changes.
    entered, first_is_done = [queue.SimpleQueue(), queue.SimpleQueue()], queue.SimpleQueue()

    def function(x, index):
        for _ in range(8):  # a capture may run the function again
            entered[index].put(None)
        entered[1 - index].get(timeout=PATIENCE_S)
        if index:
            first_is_done.get(timeout=PATIENCE_S)
        return x * index

    def run(index):
        foregrad.compile(lambda x: function(x, index), backend="eager")(torch.ones(3))
        for _ in range(0 if index else 8):
            first_is_done.put(None)

    from torch.utils import _python_dispatch

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl
