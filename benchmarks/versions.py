"""Overhead of calls and time to both graphs on several versions of PyTorch, each beside its own AOTAutograd.

    python -m benchmarks.versions .venv/bin/python .venv-torch-2.15.0/bin/python

The interpreters run in turns, `--rounds` times, each in a process of its own: a slow minute slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

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


def collect(pythons: Sequence[str], rounds: int) -> Section:
    """One table for all these interpreters."""
    times: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for python in pythons:
            command = [python, "-m", "benchmarks.versions", "--measure"]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            measured = json.loads(next(line for line in said.splitlines() if line.startswith(_MARK))[len(_MARK) :])
            for name, pair in measured["rows"].items():
                times[name][measured["torch"]].append(pair)
    versions = list(next(iter(times.values())))
    section = Section(
        "Versions of PyTorch",
        "Overhead of a call beyond its graphs in microseconds, and time to both graphs in seconds: ours / AOTAutograd of that "
        f"version, and their ratio. Medians of {rounds} processes, which ran in turns. Last: ratio by ratio, at most 1.1 asked.",
        ["what", *(part for v in versions for part in (v, "ratio")), f"{versions[-1]} by {versions[0]}"],
    )
    for name, by_version in times.items():
        cells, ratios, seconds = [], [], {}
        unit, digits = (1e-6, 1) if name.startswith("call") else (1, 2)
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
    parser.add_argument("--measure", action="store_true", help="only measure here, and print what programs read")
    options = parser.parse_args()
    if options.measure:
        print(_MARK + json.dumps(measure()))
        return
    write_results([collect(options.pythons, options.rounds)], options.out)


if __name__ == "__main__":
    main()
