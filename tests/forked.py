"""Programs in processes of their own that start warm: forked from one that has imported PyTorch and foregrad.

To import them takes a process longer than most of these programs run. Not for tests of what a fresh process does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

__all__ = ["Forked", "run", "run_text", "start"]

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
    "torch._dynamo.convert_frame",  # by every capture
)
# For programs that import foregrad themselves: with parts of it hidden, or with other settings.
_BARE = tuple(name for name in _IMPORTED if name.partition(".")[0] != "foregrad")
_servers: dict[tuple[int, bool], subprocess.Popen[str]] = {}  # by the process that started them, and whether bare
_asking = threading.RLock()


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


def run(
    program: str, *arguments: str, seconds: float = 300, bare: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a module, or a file that ends in `.py`, to its end, with these variables besides this process's own.

    Raises `TimeoutExpired` after that many seconds. Bare, the process has imported PyTorch alone, and shows warnings.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (pathlib.Path(folder, name) for name in ("out", "err"))
        variables = {**os.environ, **environment}
        process = start(program, [*arguments], str(out), errors=str(err), environment=variables, bare=bare)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess([program, *arguments], code, out.read_text(), err.read_text())


def run_text(text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program's text, as `run` does."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.py")
        path.write_text(text)
        return run(str(path), **options)


def start(
    program: str,
    arguments: list[str],
    output: str,
    *,
    errors: str = "",
    environment: dict[str, str] | None = None,
    bare: bool = False,
) -> Forked:
    """Run `python -W ignore -m program arguments`, all output of which goes to the file `output`.

    `errors` is a file for what it writes to stderr, `environment` all its variables; foregrad's settings are read anew.
    """
    server = _servers.get((os.getpid(), bare))
    if server is None or server.poll() is not None:
        own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])}
        own["OMP_NUM_THREADS"] = "1"  # a child of a process with threads has none of them
        how = ["-m", "tests.forked", "bare"] if bare else ["-W", "ignore", "-m", "tests.forked"]
        command = [sys.executable, *how]
        server = subprocess.Popen(command, cwd=_ROOT, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        _servers[os.getpid(), bare] = server
        atexit.register(_end, server)
    request = {"program": program, "arguments": arguments, "outputs": [output, errors], "environment": environment}
    pid = _asked(server, request)
    assert pid is not None
    return Forked(server, pid)


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait()
    server.stdout.close()


def _asked(server: subprocess.Popen[str], request: dict[str, object]) -> int | None:
    assert server.stdin is not None
    assert server.stdout is not None
    with _asking:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer: int | None = json.loads(server.stdout.readline())
    return answer


def _serve() -> dict[str, Any] | None:
    """Answer requests until there are no more: None. In each child: what to run."""
    for name in _BARE if sys.argv[1:] == ["bare"] else _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the children look at what they make, and copy no page of what was imported
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


def _run(request: dict[str, Any]) -> None:
    output, errors = request["outputs"]
    for stream, path in ((1, output), (2, errors or output)):
        mode = os.O_APPEND if stream == 2 and path == output else os.O_TRUNC
        file = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600)
        os.dup2(file, stream)
    if request["environment"] is not None:
        _take(request["environment"])
    program, sys.argv[1:] = request["program"], request["arguments"]
    if program.endswith(".py"):
        sys.argv[0] = program
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _take(environment: dict[str, str]) -> None:
    """Let this process have these variables, and the settings that they make."""
    os.environ.clear()
    os.environ.update(environment)
    if "foregrad" not in sys.modules:
        return
    from foregrad import config as settings

    made = importlib.import_module("foregrad.config")._from_environment()
    for name in settings.names():
        setattr(settings, name, getattr(made, name))


if __name__ == "__main__":
    to_run = _serve()
    if to_run is not None:
        _run(to_run)
