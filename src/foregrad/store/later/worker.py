"""The process that compiles: a single process beside the program, started when there is first work for it.

A thread hands over the graphs in turn, and looks whether a former process has compiled a graph already. The process
works at low priority, ends with the program, and leaves its results in the caches on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any, Protocol

import torch

from ...locks import importing, make_lock
from .job import StaysError

_PID = os.getpid()
_IDLE_S = 60.0  # then the process ends, until there is more work
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from foregrad.store.later.child import main; main()"


class Task(Protocol):
    """A graph to be compiled."""

    def message(self) -> dict[str, Any] | None:
        """The work as JSON; None if a former process did it. Called on the thread."""

    def done(self, why: str = "", *, stays: bool = False) -> None:
        """The graph is compiled. `why`: it failed, or, if it `stays`, the program has to compile the graph itself."""


def may_work() -> bool:
    """Whether a process may compile beside the program, and no result depends on the moment of the change."""
    if os.getpid() != _PID or multiprocessing.parent_process() is not None:
        return False  # forked, or a worker
    if torch.are_deterministic_algorithms_enabled() or sys.is_finalizing() or not sys.executable:
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False  # all ranks run equal graphs
    return not any(device.is_available() for device in (torch.cuda, torch.xpu, torch.backends.mps))


class Worker:
    """The process, and the thread that hands over graphs."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None

    def submit(self, task: Task) -> None:
        self._tasks.put(task)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="foregrad-later")
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                self.stop()
                continue
            try:
                with importing():
                    message = task.message()
                reply = {} if message is None else self._asked(message)
                with importing():
                    task.done(reply.get("error", ""), stays=reply.get("stays", False))
            except StaysError as why:
                task.done(str(why), stays=True)
            except Exception as error:  # the graph stays on eager's kernels; the message says so
                task.done(f"{type(error).__name__}: {error}")
            del task

    def _asked(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        if not line:
            self.stop()
            return {"error": "the process that compiled it has ended"}
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _START, json.dumps(sys.path)]
        apart: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {}  # Ctrl-C is for this process
        process = subprocess.Popen(  # noqa: S603 (Python itself)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **apart
        )
        atexit.register(self.stop)
        return process

    def stop(self) -> None:
        """End the process, with the compilers that it started."""
        process, self._process = self._process, None
        if process is None or os.getpid() != _PID:
            return
        atexit.unregister(self.stop)
        with contextlib.suppress(OSError):
            if process.poll() is None and os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


WORKER = Worker()
