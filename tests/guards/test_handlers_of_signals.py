"""A signal's handler that runs in a capture is not the program: its writes stay, its error arrives, nothing refuses it."""

import contextlib
import random
import signal
import sys
import threading
import time

import pytest
import torch

import foregrad
from foregrad.tracing.capture import CaptureRun

STATE, LOG, SEEN = {"handled": 0, "calls": 0}, [], []
COUNT = 0


class Handled(Exception):
    pass


def function(x):
    STATE["calls"] += 1
    SEEN.append("before")
    y = x * 2
    for _ in range(40_000):
        sum([1, 2])
    SEEN.append("behind")
    return y.sin() * STATE["calls"]


def opens_a_file(path):
    path.write_text("written")


def changes_state(path):
    global COUNT
    COUNT += 1
    STATE["handled"] += 1
    LOG.append(len(LOG))


def asks_a_clock_and_draws(path):
    time.monotonic()
    random.random()
    torch.ones(2).add_(1)


def prints(path):
    print("handled")


def writes_and_raises(path):
    path.write_text("written")
    LOG.append(SEEN.count("before") - SEEN.count("behind"))
    raise Handled("from the handler")


def send(main):
    """Once, while the main thread is in the loop of the function."""
    end, code = time.monotonic() + 60, function.__code__
    while time.monotonic() < end:
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None and frame.f_lineno in (code.co_firstlineno + 4, code.co_firstlineno + 5):
            signal.pthread_kill(main, signal.SIGUSR1)
            return


def called(call, handle, path):
    global COUNT
    COUNT = 0
    STATE.update(handled=0, calls=0)
    LOG.clear()
    SEEN.clear()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handle(path))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    sender = threading.Thread(target=send, args=(threading.get_ident(),))
    sender.start()
    results = []
    try:
        for i in range(3):
            try:
                results.append(call(torch.full((2,), float(i))).tolist())
            except Handled as error:
                results.append(str(error))
    finally:
        sender.join()
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGUSR1, before)
    text = path.read_text() if path.exists() else None
    path.unlink(missing_ok=True)
    return results, dict(STATE), [*LOG], COUNT, text, [*SEEN]


@pytest.mark.parametrize("handle", [opens_a_file, changes_state, asks_a_clock_and_draws, prints])
def test_a_handler_does_in_a_capture_what_it_does_in_eager(handle, tmp_path, capsys):
    torch._dynamo.reset()
    expected, said = called(function, handle, tmp_path / "file"), capsys.readouterr().out
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    assert called(compiled, handle, tmp_path / "file") == expected
    assert capsys.readouterr().out == said
    assert len(compiled.foregrad.compilations) <= 3, "as without a signal"


def test_the_error_of_a_handler_that_writes_first_arrives_and_its_file_stays(tmp_path):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    results, state, log, _, text, seen = called(compiled, writes_and_raises, tmp_path / "file")
    assert results.count("from the handler") == 1
    assert text == "written"
    assert state["calls"] == seen.count("before") == 3
    (in_the_loop,) = log  # 0 where the signal, sent in the loop, arrived behind it
    assert in_the_loop in (0, 1)
    assert seen.count("behind") == 3 - in_the_loop


def test_a_signal_that_the_function_sends_itself_is_handled_once():
    def sends(x):
        STATE["calls"] += 1
        signal.raise_signal(signal.SIGUSR1)
        return x * 2

    compiled = foregrad.compile(sends, backend="eager", on_unsupported="eager")
    STATE.update(handled=0, calls=0)
    before = signal.signal(signal.SIGUSR1, lambda *_: STATE.update(handled=STATE["handled"] + 1))
    try:
        with pytest.warns(foregrad.errors.ForegradWarning, match="raise_signal"):
            for _ in range(3):
                compiled(torch.ones(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert STATE == {"handled": 3, "calls": 3}


def test_a_capture_on_another_thread_leaves_handlers_of_the_main_thread_alone(monkeypatch):
    contexts, handlers = [], CaptureRun._handlers

    def noted(run):
        contexts.append(handlers(run))
        return contexts[-1]

    monkeypatch.setattr(CaptureRun, "_handlers", noted)
    compiled = foregrad.compile(lambda x: x * 2, backend="eager")
    thread = threading.Thread(target=compiled, args=(torch.ones(2),))
    thread.start()
    thread.join()
    compiled(torch.ones(2, 2, dtype=torch.float64))
    on_thread, on_main = contexts[0], contexts[-1]
    assert isinstance(on_thread, contextlib.nullcontext)
    assert not isinstance(on_main, contextlib.nullcontext)
