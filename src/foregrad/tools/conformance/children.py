"""The suite in child processes, a case at a time: one that ends or stands still is a finding, and the next one starts.

A child reads the names of cases, a line each, and answers with a line of JSON for each. Ahead of each graph that it
hands to the compiler, it writes the graph's program: where the child ends, the last one is at hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foregrad.tools.cli.screen import Advance

from .cases import JOIN, Case, Selection, groups_of, in_turn
from .check import subject_for
from .names import name_for
from .probe import name_of
from .report import CaseVerdict, ConformanceReport, Finding
from .trial import stem_of, tried, write_whole

_START = 300.0  # seconds that a child may take to import all it needs
_LAST_BREATH = 10.0  # seconds from the end of a child's output to the end of its process
_PREFIX = "\x1eforegrad "


@dataclasses.dataclass(frozen=True)
class Request:
    """A child's task, as text."""

    kind: str
    name: str
    target: str
    selection: Selection
    folder: str | None

    @classmethod
    def of(cls, kind: str, value: Any, selection: Selection, folder: str | None, decompositions: Any) -> Request:
        """The request. Raises `ValueError` for a subject without a name that a new process can import."""
        if decompositions is not None:
            raise ValueError("a table of decompositions can't be handed to child processes: leave `isolated` out")
        title = value if isinstance(value, str) else name_of(value)
        return cls(kind, title, name_for(value), selection, folder)


def run_isolated(request: Request, *, jobs: int, timeout: float, progress: Advance | None = None) -> ConformanceReport:
    """Run the cases in `jobs` child processes. Raises `ValueError` where nothing is selected or can be imported."""
    begin = time.perf_counter()
    subject_for(request.kind, request.target)  # an error here, not in each child
    cases = request.selection.cases()
    if not cases:
        raise ValueError(f"the suite has no case {', '.join(request.selection.only)}")
    left: queue.SimpleQueue[list[Case]] = queue.SimpleQueue()
    for group in groups_of(cases):
        left.put(group)
    by_name: dict[str, Finding] = {}

    def found(finding: Finding) -> None:
        by_name[finding.case] = finding
        if progress is not None:
            progress(len(by_name), finding.case)

    def work() -> None:
        with _Child(request) as child:
            while True:
                try:
                    group = left.get_nowait()
                except queue.Empty:
                    return
                in_turn(group, lambda case: child.tried(case.name, timeout * case.count), found)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(max(1, min(jobs, left.qsize())))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    findings = tuple(by_name[case.name] for case in cases if case.name in by_name)
    return ConformanceReport(request.name, request.selection.size, findings, time.perf_counter() - begin)


class _Child:
    """A child process, started when a case comes and again after it ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the child
        self.last = Path(tempfile.mkdtemp(prefix="foregrad_check_"))

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.said.close()
        if not any(self.last.iterdir()):
            self.last.rmdir()

    def tried(self, name: str, timeout: float) -> Finding:
        """The finding of a case; `CRASHED` where the child ends, or takes longer than that."""
        begin = time.perf_counter()
        if self.process is None:
            self._start()
            try:
                started = self._line(_START) is not None
            except queue.Empty:
                started = False
            if not started:
                self._end()
                return Finding(name, CaseVerdict.CRASHED, f"the child process did not start\n{self._tail()}")
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            line = self._line(timeout)
        except (OSError, queue.Empty) as error:
            line, is_late = None, isinstance(error, queue.Empty)
        else:
            is_late = False
        if line is not None:
            return Finding.from_json(json.loads(line))
        seconds = time.perf_counter() - begin
        code = self._end(0 if is_late else _LAST_BREATH)
        text = f"the case still ran after {timeout:.0f} s" if is_late else f"the process ended by {_ending(code)}"
        tail = self._tail()
        return Finding(
            name, CaseVerdict.CRASHED, text + (f"\n{tail}" if tail else ""), program=self._kept(name), seconds=seconds
        )

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "foregrad.tools.conformance.children"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=environment,
            start_new_session=True,  # ends the child's own children too
        )
        assert self.process.stdin is not None
        request = {**dataclasses.asdict(self.request), "last": str(self.last)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self.lines = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_PREFIX):
                lines.put(line.removeprefix(_PREFIX))
        lines.put(None)

    def _line(self, seconds: float) -> str | None:
        """The next answer; None where the child ended. Raises `queue.Empty` after that many seconds."""
        return self.lines.get(timeout=seconds)

    def _end(self, patience: float = 0) -> int:
        """End the child after `patience` seconds to end by itself; its exit code, negative for a signal."""
        process, self.process = self.process, None
        if process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        return code

    def _tail(self) -> str:
        """The last that the child said on its standard error."""
        self.said.seek(0)
        text = self.said.read()
        self.said.seek(0)
        self.said.truncate()
        return "\n".join(text.strip().splitlines()[:4])

    def _kept(self, case: str) -> str | None:
        """The program of the last graph that the child was at, under the name of the case."""
        programs = sorted(self.last.glob("reproduce_*"))
        if not programs:
            return None
        folder = Path(self.request.folder or tempfile.mkdtemp(prefix="foregrad_check_"))
        folder.mkdir(parents=True, exist_ok=True)
        stem = stem_of(case)
        for program in programs:
            text = program.read_bytes()
            if program.suffix == ".py":
                text = text.replace(b"reproduce_graph", f"reproduce_{stem}".encode())
            (folder / f"reproduce_{stem}{program.suffix}").write_bytes(text)
            program.unlink()
        return str(folder / f"reproduce_{stem}.py")


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"the signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def main() -> None:
    """Serve: the request, then names of cases, from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler's prints are no answer
    request = json.loads(sys.stdin.readline())
    selection = Selection(request["selection"]["size"], dtypes=tuple(request["selection"]["dtypes"]))
    last = Path(request["last"])
    subject = subject_for(request["kind"], request["target"], request["folder"])
    maker_name = subject.backend or subject.name

    def note(module: Any, inputs: list[Any] | None) -> None:
        write_whole(subject, maker_name, module, inputs, str(last))

    subject = dataclasses.replace(subject, about_to=note)
    only: Sequence[str] = tuple(request["selection"]["only"])
    cases = {case.name: case for case in dataclasses.replace(selection, only=tuple(only)).cases()}
    gc.freeze()  # collections look at what a case makes, not at PyTorch's database
    _say(answers, "{}")
    for line in iter(sys.stdin.readline, ""):
        named = [cases[name] for name in line.rstrip("\n").split(JOIN)]
        finding = tried(named[0] if len(named) == 1 else Case.joined(named), subject)
        for program in last.glob("reproduce_*"):
            program.unlink()
        _say(answers, json.dumps(finding.to_json()))


def _say(answers: Any, text: str) -> None:
    answers.write(f"{_PREFIX}{text}\n")
    answers.flush()


if __name__ == "__main__":
    main()
