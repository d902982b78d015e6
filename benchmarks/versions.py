"""Overhead of calls and time to both graphs on several versions of PyTorch, each beside its own AOTAutograd.

    python -m benchmarks.versions .venv/bin/python .venv-torch-2.15.0/bin/python

The interpreters run in turns, `--rounds` times, each in a process of its own: a slow minute slows all of them.
`--instructions` counts the processor's instructions of calls, with valgrind and a C compiler: no load changes these.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Section, ratio, write_results

__all__ = ["collect"]

_CALLS = ("tiny", "13 inputs", "100 layers")
_CAPTURES = ("resnet-50", "mlp-200")
_MARK = "measured: "


def measure() -> dict[str, object]:
    """The version of PyTorch here and, for each row, seconds of ours and of PyTorch's."""
    import torch

    from benchmarks import capture, overhead

    torch.set_num_threads(1)
    found: dict[str, tuple[float, float]] = {}
    for row in overhead.collect(list(_CALLS), 30).data:
        graphs, ours, theirs = (row[name] / 1e6 for name in ("raw_us", "ours_us", "theirs_us"))
        found[f"call: {row['case']}, {row['phase']}"] = (ours - graphs, theirs - graphs)
    for row in capture.collect(list(_CAPTURES), 1)[0].data:
        found[f"capture: {row['model']}, {row['partition']}"] = (row["ours_s"], row["pytorch_s"])
    return {"torch": torch.__version__.partition("+")[0], "rows": found}


_VALGRIND = """
#include <valgrind/callgrind.h>
void start() { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(const char* label) { CALLGRIND_DUMP_STATS_AT(label); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def count(folder: Path) -> dict[str, object]:
    """As `measure`, under valgrind: instructions of calls, which it writes to files in this folder."""
    import torch

    from benchmarks import overhead

    (folder / "counter.c").write_text(_VALGRIND)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "counter.so", folder / "counter.c"], check=True)
    counter = ctypes.CDLL(str(folder / "counter.so"))
    torch.set_num_threads(1)
    total: dict[str, dict[str, float]] = {}
    for case in [case for case in overhead.CASES if any(name in case.name for name in _CALLS)]:
        for phase, calls in zip(("forward", "forward + backward"), overhead.variants(case), strict=True):
            label = f"call: {case.name}, {phase}"
            total[label] = {}
            for name in ("raw", "ours", "theirs"):
                for _ in range(20):
                    calls[name]()
                gc.collect()
                gc.disable()
                counter.start()
                for _ in range(20):
                    calls[name]()
                counter.stop(f"{label}|{name}".encode())
                gc.enable()
    for path in folder.glob("out.*"):
        found = re.search(r"Client Request: (.*)\|(\w+)$.*^totals: (\d+)$", path.read_text(), re.MULTILINE | re.DOTALL)
        if found is not None:
            total[found[1]][found[2]] = int(found[3]) / 20
    rows = {label: (t["ours"] - t["raw"], t["theirs"] - t["raw"]) for label, t in total.items()}
    return {"torch": torch.__version__.partition("+")[0], "rows": rows}


def _run(python: str, instructions: bool) -> dict[str, object]:
    command = [python, "-m", "benchmarks.versions", "--measure"]
    with tempfile.TemporaryDirectory() as folder:
        if instructions:
            valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
            command = [*valgrind, python, "-m", "benchmarks.versions", "--count", folder]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, object] = json.loads(next(x for x in said.splitlines() if x.startswith(_MARK))[len(_MARK) :])
    return result


def collect(pythons: Sequence[str], rounds: int, instructions: bool = False) -> Section:
    """One table for all these interpreters."""
    times: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for python in pythons:
            measured: Any = _run(python, instructions)
            for name, pair in measured["rows"].items():
                times[name][measured["torch"]].append(pair)
    versions = list(next(iter(times.values())))
    section = Section(
        "Versions of PyTorch" + (", in instructions" if instructions else ""),
        (
            "Thousands of instructions of a call beyond its graphs, counted by valgrind"
            if instructions
            else "Overhead of a call beyond its graphs in microseconds, and time to both graphs in seconds"
        )
        + ": ours / AOTAutograd of that version, and their ratio. "
        + ("" if instructions else f"Medians of {rounds} processes, which ran in turns. ")
        + "Last: ratio by ratio, at most 1.1 asked.",
        ["what", *(part for v in versions for part in (v, "ratio")), f"{versions[-1]} by {versions[0]}"],
    )
    for name, by_version in times.items():
        cells, ratios, seconds = [], [], {}
        unit, digits = (1e3, 1) if instructions else (1e-6, 1) if name.startswith("call") else (1, 2)
        for version in versions:
            ours, theirs = (statistics.median(column) for column in zip(*by_version[version], strict=True))
            ratios.append(ours / theirs)
            seconds[version] = ours, theirs
            cells += [f"{ours / unit:.{digits}f} / {theirs / unit:.{digits}f}", f"{ratios[-1]:.3f}"]
        section.add([name, *cells, ratio(ratios[-1], ratios[0])], what=name, seconds=seconds)
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="one interpreter for each PyTorch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the results")
    parser.add_argument("--instructions", action="store_true", help="count instructions of calls, under valgrind")
    parser.add_argument("--measure", action="store_true", help="only measure here, and print what programs read")
    parser.add_argument("--count", type=Path, help="as --measure, under valgrind, which writes to this folder")
    options = parser.parse_args()
    if options.measure or options.count:
        print(_MARK + json.dumps(count(options.count) if options.count else measure()))
        return
    rounds = 1 if options.instructions else options.rounds
    write_results([collect(options.pythons, rounds, options.instructions)], options.out)


if __name__ == "__main__":
    main()
