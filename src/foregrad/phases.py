"""The phases of a compilation: the time of each, and a line for people who wait.

`with compiling(name):` stands around all compilation for a function, `with phase("capture"):` around a part;
`counted(done, total)` says how far the current phase is. Times are exclusive: an inner phase's time is not the outer's.
After two seconds the outermost compilation of a thread shows its phase on stderr, if that is a terminal or a notebook.
`explain` and `verify` stand in `compiling` too, with a verb of their own, and say so after one second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from .config import config
from .locks import make_lock

_AFTER_S = 2.0
_EVERY_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseTime:
    """The time that one phase of compiling one function took, in seconds, in `count` runs."""

    function: str
    phase: str
    count: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class CompileTimes:
    """The times of all compilations so far, by function and phase; `str()` is a table.

    Example:
        >>> import torch, foregrad
        >>> _ = foregrad.compile(torch.sin, backend="eager")(torch.ones(2))
        >>> {"capture", "partition"} <= {entry.phase for entry in foregrad.compile_times().entries}
        True
    """

    entries: tuple[PhaseTime, ...]

    @property
    def seconds(self) -> float:
        """The sum of all."""
        return sum(entry.seconds for entry in self.entries)

    def to_json(self) -> list[dict[str, object]]:
        """The entries as plain data."""
        return [dataclasses.asdict(entry) for entry in self.entries]

    def __str__(self) -> str:
        if not self.entries:
            return "nothing was compiled yet"
        width = max(len(entry.function) for entry in self.entries)
        lines = [f"{'function':<{width}}  {'phase':<18} {'runs':>5} {'seconds':>9}"]
        lines += [f"{e.function:<{width}}  {e.phase:<18} {e.count:>5} {e.seconds:>9.3f}" for e in self.entries]
        return "\n".join([*lines, f"{'all':<{width}}  {'':<18} {'':>5} {self.seconds:>9.3f}"])

    __repr__ = __str__


class _Compilation:
    """One compilation, of the function `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin = time.perf_counter()
        self.phases: list[_Phase] = []
        self.took: dict[str, float] = {}

    def described(self) -> str:
        """The phases so far, the current one last."""
        parts = [f"{what} {seconds:.1f} s" for what, seconds in self.took.items()]
        if self.phases:
            current = self.phases[-1]
            parts.append(f"{current.what}, {current.count}" if current.count else current.what)
        return ", ".join(parts)


@dataclasses.dataclass(slots=True)
class _Phase:
    what: str
    begin: float
    inner: float = 0.0  # taken by phases inside
    count: str = ""


_lock = make_lock()
_times: dict[tuple[str, str], tuple[int, float]] = {}
_thread = threading.local()


def compile_times(*, clear: bool = False) -> CompileTimes:
    """The seconds that compilations have taken in the process so far, by function and phase.

    The phases are `capture`, `partition` (with a backend's passes over the whole graph), `compile forward`, `compile
    backward` and `compile inference` (the backend), and `guards`. Backwards are compiled when they are first needed.

    Args:
        clear: reset the times after reading them.

    Example:
        >>> import torch, foregrad
        >>> _ = foregrad.compile(torch.cos, backend="eager")(torch.ones(2))
        >>> [entry.count for entry in foregrad.compile_times(clear=True).entries if entry.phase == "capture"][-1] > 0
        True
        >>> print(foregrad.compile_times())
        nothing was compiled yet
    """
    with _lock:
        found = tuple(PhaseTime(*key, *value) for key, value in _times.items())
        if clear:
            _times.clear()
    return CompileTimes(found)


@contextlib.contextmanager
def phase(what: str, *, compiles: bool = True) -> Iterator[None]:
    """Context: a phase inside `compiling`, called `what`. `compiles`: `compile_times` lists the phase."""
    run: _Compilation | None = getattr(_thread, "run", None)
    if run is None:
        yield
        return
    current = _Phase(what, time.perf_counter())
    run.phases.append(current)
    try:
        yield
    finally:
        took = time.perf_counter() - current.begin
        run.phases.remove(current)
        if run.phases:
            run.phases[-1].inner += took
        own = took - current.inner
        run.took[what] = run.took.get(what, 0.0) + own
        if compiles:
            with _lock:
                count, seconds = _times.get((run.name, what), (0, 0.0))
                _times[run.name, what] = count + 1, seconds + own


def counted(done: int, total: int, of: str) -> None:
    """The thread's current phase is at `done` of `total` things, called `of`."""
    run: _Compilation | None = getattr(_thread, "run", None)
    if run is not None and run.phases:
        run.phases[-1].count = f"{of} {done} of {total}"


def is_counted() -> bool:
    """Whether the thread compiles, so that `counted` is heard."""
    return getattr(_thread, "run", None) is not None


@contextlib.contextmanager
def compiling(name: str, part: str = "", verb: str = "compiling") -> Iterator[None]:
    """Context: a compilation for the function `name`. Progress lines name the `part` of the function and the `verb`."""
    outer: _Compilation | None = getattr(_thread, "run", None)
    if outer is not None and outer.name == name:
        yield
        return
    run = _thread.run = _Compilation(name)
    try:
        with contextlib.nullcontext() if outer is not None else _told(run, f"{part} of {name}" if part else name, verb):
            yield
    finally:
        _thread.run = outer
        if outer is not None and outer.phases:
            outer.phases[-1].inner += sum(run.took.values())


def _wanted_at() -> tuple[TextIO, bool] | None:
    """The stream for progress, and whether a line there can be written again; None where nobody listens."""
    out = sys.stderr
    try:
        is_terminal = out.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return None
    wanted: bool | None = config.progress
    is_notebook = type(out).__module__.startswith("ipykernel.")
    return (out, is_terminal) if wanted or (wanted is None and (is_terminal or is_notebook)) else None


def say(text: str) -> None:
    """A line about a compilation, where progress is shown."""
    wanted = _wanted_at()
    if wanted is not None:
        print(f"foregrad: {text}", file=wanted[0], flush=True)


@contextlib.contextmanager
def _told(run: _Compilation, what: str, verb: str) -> Iterator[None]:
    wanted = _wanted_at()
    if wanted is None:
        yield
        return
    out, is_terminal = wanted
    done, said = threading.Event(), threading.Event()

    def watch() -> None:
        is_compilation = verb == "compiling"
        if done.wait(_AFTER_S if is_compilation else _AFTER_S / 2):
            return
        said.set()
        why = " (first call with these inputs)" if is_compilation else ""
        print(f"foregrad: {verb} `{what}`{why} ...", file=out, flush=True)
        while is_terminal and not done.wait(_EVERY_S):
            out.write(f"\r\x1b[Kforegrad: {run.described()[:100]} ({time.perf_counter() - run.begin:.0f} s so far)")
            out.flush()

    watcher = threading.Thread(target=watch, daemon=True, name="foregrad-progress")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        if said.is_set():
            watcher.join(1.0)
            end = "\r\x1b[K" if is_terminal else ""
            took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run.took.items())
            print(
                f"{end}foregrad: `{what}` took {time.perf_counter() - run.begin:.0f} s ({took})", file=out, flush=True
            )
