"""Programs in processes of their own that start warm: forked from one which has imported PyTorch and foregrad.

To import them takes a process longer than most of these programs run. Not for tests of what a fresh process does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time

__all__ = ["Forked", "start"]

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "foregrad",
    "foregrad.api",
    "foregrad.aot",
    "foregrad.dispatch.dispatcher",
    "foregrad.tracing.capture",
)
_servers: dict[int, subprocess.Popen[str]] = {}  # by the process that started them


class Forked:
    """A process that was started."""

    def __init__(self, server: subprocess.Popen[str], pid: int) -> None:
        self._server, self.pid = server, pid

    def wait(self, seconds: float) -> int:
        """The exit code, negative for a signal. Raises `TimeoutExpired` after that many seconds."""
        until = time.monotonic() + seconds
        while True:
            code = _asked(self._server, {"code_of": self.pid})
            if code is not None:
                return int(code)
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), seconds)
            time.sleep(0.02)

    def kill(self) -> None:
        """End it, where it runs."""
        if _asked(self._server, {"code_of": self.pid}) is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(60)


def start(module: str, arguments: list[str], output: str) -> Forked:
    """Run `python -W ignore -m module arguments`, all output of which goes to the file `output`."""
    server = _servers.get(os.getpid())
    if server is None or server.poll() is not None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])}
        environment["OMP_NUM_THREADS"] = "1"  # a child of a process with threads has none of them
        command = [sys.executable, "-W", "ignore", "-m", "tests.forked"]
        server = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _servers[os.getpid()] = server
    return Forked(server, _asked(server, {"module": module, "arguments": arguments, "output": output}))


def _asked(server: subprocess.Popen[str], request: dict[str, object]) -> int | None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer: int | None = json.loads(server.stdout.readline())
    return answer


def _serve() -> dict[str, object] | None:
    """Answer requests until there are no more: None. In each child: what to run."""
    for name in _IMPORTED:
        importlib.import_module(name)
    children: dict[int, int | None] = {}
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "code_of" in request:
            pid = request["code_of"]
            if children[pid] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                children[pid] = os.waitstatus_to_exitcode(status) if ended else None
            answer = children[pid]
        else:
            answer = os.fork()
            if not answer:
                return request
            children[answer] = None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid, code in children.items():
        if code is None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    return None


def _run(request: dict[str, object]) -> None:
    file = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv[1:] = request["arguments"]  # type: ignore[misc]
    runpy.run_module(str(request["module"]), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    to_run = _serve()
    if to_run is not None:
        _run(to_run)
