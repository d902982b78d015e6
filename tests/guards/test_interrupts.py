"""Signals whose handlers raise, at chosen moments of a first call and of a first backward."""

from __future__ import annotations

import _thread
import ctypes
import signal
import threading
import time

import pytest
import torch

import foregrad
from foregrad import interrupts
from foregrad._torch import patches
from tests.guards.stress import leftovers, state

pytestmark = [
    pytest.mark.skipif(
        threading.current_thread() is not threading.main_thread(), reason="Python runs handlers on the main thread"
    ),
    pytest.mark.usefixtures("captures_may_wait"),
    pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning"),  # the functions here write down what passed
]


class Stopped(Exception):
    pass


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = state()
    yield
    assert not leftovers(before)
    assert not interrupts.held.depth
    assert not interrupts.held.pending


@pytest.fixture(params=["SIGINT", "SIGALRM"])
def number(request):
    """A signal, whose handler raises `Stopped`."""
    number = getattr(signal, request.param)

    def stop(*_):
        raise Stopped

    before = signal.signal(number, stop)
    yield number
    signal.signal(number, before)


def check_that_it_runs_compiled(compiled, function, x):
    assert torch.equal(compiled(x), function(x))
    assert len(compiled.foregrad.specializations) == 1


def test_the_users_code_is_interrupted_at_once(number):
    passed = []

    def function(x):
        y = x * 2
        if not passed:
            passed.append("signal")
            signal.raise_signal(number)
            passed.append("after it")
        return y.sin()

    compiled = foregrad.compile(function, backend="eager")
    with pytest.raises(Stopped):
        compiled(torch.ones(3))
    assert passed == ["signal"]
    check_that_it_runs_compiled(compiled, function, torch.ones(3))


def test_a_wait_of_the_users_code_is_interrupted(number):
    patience = [20]

    def function(x):
        time.sleep(patience.pop() if patience else 0)
        return x * 2

    compiled = foregrad.compile(function, backend="eager")
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        compiled(torch.ones(3))
    assert time.monotonic() - start < 15


def test_in_an_operator_it_waits_for_the_users_next_line(number, monkeypatch):
    """Raised in what records an operator, an exception may end the process: C++ calls Python there."""
    from foregrad.tracing.recorder.recorder import Recorder

    plain, passed = Recorder.__torch_dispatch__, []

    def dispatch(self, *args, **kwargs):
        if not passed:
            passed.append("signal")
            signal.raise_signal(number)
            passed.append("recorded")
        return plain(self, *args, **kwargs)

    def function(x):
        y = x.sin()
        if len(passed) < 3:
            passed.append("line")
        return y.cos().tan()

    compiled = foregrad.compile(function, backend="eager")
    dispatch.__code__ = dispatch.__code__.replace(co_filename=Recorder.__torch_dispatch__.__code__.co_filename)
    monkeypatch.setattr(Recorder, "__torch_dispatch__", dispatch)
    with pytest.raises(Stopped):
        compiled(torch.ones(3))
    assert passed[:2] == ["signal", "recorded"]
    monkeypatch.undo()
    check_that_it_runs_compiled(compiled, function, torch.ones(3))


def test_while_patches_are_put_in_place_it_waits(number, monkeypatch):
    install = patches._patches._install

    def interrupted():
        signal.raise_signal(number)
        install()
        signal.raise_signal(number)

    interrupted.__code__ = interrupted.__code__.replace(co_filename=patches.__file__)
    monkeypatch.setattr(patches._patches, "_install", interrupted)
    compiled = foregrad.compile(torch.sin, backend="eager")
    with pytest.raises(Stopped):
        compiled(torch.ones(3))
    monkeypatch.undo()
    check_that_it_runs_compiled(compiled, torch.sin, torch.ones(3))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_compiler_is_not_interrupted(number, phase):
    """It is the user's, but called from ours: what it makes is kept, and the handler runs then."""
    made = []

    def compiler(module, inputs):
        if not made and (phase == "forward" or "tangents" in str(module.code)):
            made.append(None)
            signal.raise_signal(number)
        return module.forward

    compiled = foregrad.compile(lambda x: (x.sin() * 2).sum(), backend=(compiler, compiler))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(Stopped):
        torch.autograd.grad(compiled(x), x)
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], x.detach().cos() * 2)


def test_nothing_takes_the_exception_of_a_handler_for_a_failure_of_its_own(number):
    """With symbolic sizes a capture that fails is tried again without them; not so here."""
    runs = []

    def function(x):
        runs.append(None)
        if len(runs) == 2:
            signal.raise_signal(number)
        return x * 2

    compiled = foregrad.compile(function, backend="eager", dynamic=True)
    with pytest.raises(Stopped):
        for size in (3, 4, 5):
            compiled(torch.ones(size))


def test_a_program_may_set_handlers_inside(number):
    def function(x):
        before = signal.signal(number, signal.SIG_IGN)
        signal.raise_signal(number)
        signal.signal(number, before)
        return x * 2

    compiled = foregrad.compile(function, backend="eager")
    handler = signal.getsignal(number)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert signal.getsignal(number) is handler


def test_a_thread_that_waits_for_its_turn_is_interrupted(number):
    """Another thread captures the same function, and takes its time."""
    inside, done = threading.Event(), threading.Event()

    def function(x):
        if not inside.is_set():
            inside.set()
            done.wait(60)
        return x * 2

    compiled = foregrad.compile(function, backend="eager")
    other = threading.Thread(target=lambda: compiled(torch.ones(3)))
    other.start()
    inside.wait(60)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.start()
    with pytest.raises(Stopped):
        compiled(torch.ones(3))
    done.set()
    other.join(60)
    timer.join()
    check_that_it_runs_compiled(compiled, function, torch.ones(3))


def test_the_second_interrupt_stops_a_compiler_that_works_for_long(number):
    @interrupts.runs_compiler
    def compile_graph(inner):
        return inner()

    compile_graph.__code__ = compile_graph.__code__.replace(co_filename=interrupts.__file__)
    interrupts.runs_compiler(compile_graph)
    passed = []

    def inner():
        signal.raise_signal(number)
        passed.append("first")
        signal.raise_signal(number)
        passed.append("second")

    with pytest.raises(Stopped), interrupts.held:
        compile_graph(inner)
    assert passed == ["first"]


@pytest.mark.parametrize("calls_back", [False, True])
def test_a_compiler_in_python_that_spins_is_stopped_by_the_third_interrupt_at_the_latest(number, calls_back):
    presses = []

    def spin(value=None):
        while True:
            presses.append(None)
            if len(presses) > 3:
                raise AssertionError("not stopped")
            signal.raise_signal(number)

    def compiler(module, inputs):
        return foregrad.make_boxed_compiler(lambda *_: spin())(module, inputs) if calls_back else spin()

    compiled = foregrad.compile(lambda x: x * 2, backend=(compiler, compiler))
    with pytest.raises(Stopped):
        compiled(torch.ones(3))
    assert len(presses) == (3 if calls_back else 2)


def test_threads_see_no_signals(number):
    """A capture on another thread has nothing to do with the handlers."""
    handlers = []

    def function(x):
        handlers.append(signal.getsignal(number))
        return x * 2

    expected = signal.getsignal(number)
    thread = threading.Thread(target=lambda: foregrad.compile(function, backend="eager")(torch.ones(3)))
    thread.start()
    thread.join(60)
    assert set(handlers) == {expected}


def raises(error):
    raise error


# The last two are raised in C without a word, as an exception that another thread sets is.
ENDS = {
    "KeyboardInterrupt": lambda: raises(KeyboardInterrupt("enough")),
    "SystemExit": lambda: raises(SystemExit(3)),
    "_thread.exit()": lambda: _thread.exit(),
    "throw(Stopped)": lambda: (None for _ in ()).throw(Stopped),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_program_that_ends_itself_in_a_capture_has_done_what_comes_before(end):
    def ending(record):
        def f(x):
            record["n"] += 1
            record["log"].append(record["n"])
            x.add_(1)
            if record["n"] == 1:
                end()
            return x * 2

        return f

    worlds = []
    for compiles in (False, True):
        record = {"n": 0, "log": []}
        call, x, seen = ending(record), torch.zeros(2), []
        call = foregrad.compile(call, backend="eager") if compiles else call
        for _ in range(3):
            try:
                seen.append(call(x).tolist())
            except (SystemExit, KeyboardInterrupt, Stopped) as error:
                seen.append((type(error), str(error), error.__context__))
            seen.append((record["n"], [*record["log"]], x.tolist()))
        worlds.append(seen)
    assert worlds[0] == worlds[1]


def test_an_exception_that_another_thread_sets_comes_out_of_a_capture_and_the_next_call_compiles():
    """It comes when eager has made the call: it may be one of a function in C, which eager would raise by itself."""
    inside, is_set, armed, found, counted = threading.Event(), threading.Event(), [True], [], {"n": 0}
    total = torch.zeros(2)

    def function(x):
        counted["n"] += 1
        total.add_(1)
        if armed:
            inside.set()
            while not is_set.is_set():
                pass
            for _ in range(1000):
                pass
        return x * 2

    compiled = foregrad.compile(function, backend="eager", dynamic=True)

    def run():
        try:
            compiled(torch.ones(3))
        except Stopped:
            found.append("stopped")
        found.append((counted["n"], total.tolist()))
        armed.clear()
        found.append(compiled(torch.ones(3)).tolist())

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(60)
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert set_exception(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped)) == 1
    is_set.set()
    thread.join(60)
    assert found == ["stopped", (1, [1.0] * 2), [2.0] * 3]
    assert len(compiled.foregrad.specializations) == 1
    assert len(foregrad.explain_recompiles(compiled)) == 1
