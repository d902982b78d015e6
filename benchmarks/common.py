"""What the benchmarks share: how time is taken, how tables are written, where they were made.

Time is CPU time of the process: neighbours on a busy machine stretch the wall clock, and ratios of it mean nothing.
Things compared run in turns in one process, so that a slow minute slows all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "Section",
    "Timing",
    "collect_models",
    "environment",
    "interleaved_calls",
    "interleaved_once",
    "ratio",
    "write_results",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of CPU time: the least and the median of the rounds."""

    least: float
    median: float

    def text(self, unit: float, digits: int = 1) -> str:
        return f"{self.least / unit:.{digits}f} / {self.median / unit:.{digits}f}"


@dataclasses.dataclass(slots=True)
class Section:
    """One table: what `RESULTS.md` and `RESULTS.json` hold."""

    title: str
    notes: str
    columns: list[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)
    data: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, row: Sequence[str], **data: Any) -> None:
        """A row as text, and the numbers in it; printed at once, for those who wait."""
        self.rows.append(list(row))
        self.data.append(data)
        print("  " + "  ".join(f"{c}: {v}" for c, v in zip(self.columns, row, strict=True)), flush=True)

    def markdown(self) -> str:
        head = "| " + " | ".join(self.columns) + " |"
        line = "| --- |" + " ---: |" * (len(self.columns) - 1)
        rows = ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([f"## {self.title}", "", self.notes, "", head, line, *rows, ""])


def interleaved_once(
    variants: Mapping[str, Callable[[], Any]], rounds: int, before: Mapping[str, Callable[[], Any]] | None = None
) -> dict[str, Timing]:
    """Each variant run once a round, in turns; what `before` does, and collecting garbage, is not timed.

    A variant may return the seconds that count, when not all of its run does.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            if before is not None and name in before:
                before[name]()
            gc.collect()
            start = time.process_time()
            counted = run()
            took = time.process_time() - start
            times[name].append(counted if isinstance(counted, float) else took)
    return {name: Timing(min(t), statistics.median(t)) for name, t in times.items()}


def interleaved_calls(
    variants: Mapping[str, Callable[[], Any]], rounds: int, inner_s: float = 0.004
) -> dict[str, Timing]:
    """Time of one call of each variant: many short rounds, each of as many calls as fill `inner_s`.

    A round goes through the variants in another order each time: what the one before left behind, in the processor's caches
    and in the allocator, would favour some of them.
    """
    counts = {}
    for name, run in variants.items():
        for _ in range(5):
            run()
        start = time.perf_counter()
        for _ in range(10):
            run()
        once = (time.perf_counter() - start) / 10
        counts[name] = max(1, int(inner_s / max(once, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    try:
        order = list(variants.items())
        shuffle = random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(order)
            for name, run in order:
                count = range(counts[name])
                start = time.process_time()
                for _ in count:
                    run()
                times[name].append((time.process_time() - start) / len(count))
    finally:
        gc.enable()
    return {name: Timing(min(t), statistics.median(t)) for name, t in times.items()}


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.3f}" if theirs else "-"


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "jax"):
        try:
            from importlib.metadata import version

            versions[package] = version(package)
        except ImportError:
            pass
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        **versions,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


_HEAD = (
    "Written by `make bench`. Times are CPU time of the process, least / median. The machine was shared with other work: "
    "compare within a row, whose columns were measured in turns, and not across rows."
)


def write_results(sections: Sequence[Section], folder: Path) -> None:
    """`RESULTS.md` for people, `RESULTS.json` for programs. Sections that were not run now stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "RESULTS.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    made = environment()
    for section in sections:
        stored[section.title] = {**dataclasses.asdict(section), "environment": made}
    path.write_text(json.dumps(stored, indent=1) + "\n")
    page = folder / "RESULTS.md"
    # Sections that people wrote themselves stay behind the rest.
    written = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)[1:] if page.exists() else []
    own = [text.rstrip() + "\n" for text in written if text.partition("\n")[0].removeprefix("## ") not in stored]
    texts = ["# Results", "", _HEAD, ""]
    for kept in stored.values():
        place = ", ".join(f"{k} {v}" for k, v in kept["environment"].items())
        fields = {f.name: kept[f.name] for f in dataclasses.fields(Section)}
        texts += [Section(**fields).markdown(), f"*{place}*", ""]
    page.write_text("\n".join([*texts, *own]))


def collect_models(description: str | None, collect: Callable[[list[str], int], Section], models: list[str]) -> None:
    """The command of a benchmark with a row for each model: names of models, and `--rounds`. `models`: without names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=models)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    collect(options.models, options.rounds)
