"""The share of a capture that Python's state takes: its walk, comparisons, the look at code, notes of reads.

    python -m benchmarks.shares gpt2-12 bert-6     # all models without arguments

CPU time of a capture with both graphs and no kernels, as in `benchmarks.capture`. A part's time leaves out the parts
inside the part, and has two readings of the clock for each call.
"""

from __future__ import annotations

import collections
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from benchmarks.capture import DEFAULT, forget, our_capture
from benchmarks.common import Section, collect_models
from foregrad.python.own_writes import OwnWrites
from foregrad.python.program_state import ProgramState
from foregrad.python.reads import Reads
from foregrad.python.seen_code import SeenCode
from foregrad.python.state import PythonState

__all__ = ["collect"]

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "walk": ((ProgramState, "walk"), (ProgramState, "meet")),
    "comparison": ((ProgramState, "changed"), (OwnWrites, "undo")),
    "places": ((ProgramState, "references_to"), (ProgramState, "module_names")),
    "code": ((SeenCode, "scan"),),
    "writes": ((PythonState, "outputs"), (PythonState, "settle")),
    "reads": ((Reads, "note"),),
}


_NOW = [time.process_time]  # a capture replaces the name


class Clock:
    """Seconds by part; a part stands still while one inside it runs."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = collections.defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    def turn(self, part: str | None) -> None:
        """A part begins; None: the innermost ends."""
        now = _NOW[0]()
        if self._running:
            self.spent[self._running[-1]] += now - self._since
        if part is None:
            self._running.pop()
        else:
            self._running.append(part)
        self._since = _NOW[0]()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.turn(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn(None)

        return run


@contextmanager
def measured(clock: Clock) -> Iterator[None]:
    """Context: the parts tell the clock when they run."""
    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                stack.enter_context(mock.patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        yield


def collect(names: list[str], rounds: int = 5) -> Section:
    """A row for each model."""
    warnings.simplefilter("ignore")
    section = Section(
        "The share of Python's state in a capture",
        "Percent of a capture's CPU time (two graphs, no kernels, caches of operators' results emptied) that go into "
        "Python's state. The sum should be at most 10.",
        ["model", "ms", *PARTS, "sum"],
    )
    for name in names:
        run = our_capture(name, "default")
        shares: list[dict[str, float]] = []
        seconds = []
        for count in range(rounds + 1):
            forget()
            gc.collect()
            clock = Clock()
            with measured(clock):
                took = run()
            if count:
                seconds.append(took)
                shares.append({part: 100 * clock.spent[part] / took for part in PARTS})
        medians = {part: statistics.median(share[part] for share in shares) for part in PARTS}
        total = sum(medians.values())
        took = statistics.median(seconds) * 1e3
        section.add(
            [name, f"{took:.0f}", *(f"{medians[part]:.1f}" for part in PARTS), f"{total:.1f}"],
            model=name, ms=took, **medians,
        )  # fmt: skip
    return section


if __name__ == "__main__":
    collect_models(__doc__, collect, DEFAULT)
