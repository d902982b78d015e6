"""The conformance suite over five compilers.

`python -m benchmarks.check_compiler [--only NAME ...] [--jobs N] [--out DIR]`. OpenVINO is left out where it is not
installed (`pip install foregrad[openvino]`). The planted compilers are those of the suite's own tests, with one fault
each.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
from pathlib import Path

from benchmarks.common import Section, write_results
from foregrad.testing import check_compiler

PLANTED = Path(__file__).parents[1] / "tests" / "tools" / "conformance" / "planted.py"
COMPILERS = {
    "eager": "eager",
    "Inductor": "inductor",
    "OpenVINO": "torch:openvino",
    "planted: gelu by tanh": f"{PLANTED}:gelu_by_tanh",
    "planted: keeps its arguments": f"{PLANTED}:keeps_its_arguments",
    "planted: overwrites its arguments": f"{PLANTED}:overwrites_its_arguments",
}


def cpu_seconds() -> float:
    """Of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def collect(names: list[str] | None = None, jobs: int = 2) -> Section:
    """The table."""
    section = Section(
        "The conformance suite over compilers",
        "The short suite in child processes (`python -m benchmarks.check_compiler`): how many cases of each verdict,\n"
        "seconds of the wall clock and of all CPUs, the first fault that it names.",
        ["compiler", "passed", "refused", "wrong", "crashed", "skipped", "s", "CPU s", "first fault"],
    )
    for name in names or COMPILERS:
        if name == "OpenVINO" and importlib.util.find_spec("openvino") is None:
            continue
        begin = cpu_seconds()
        report = check_compiler(COMPILERS[name], isolated=True, jobs=jobs)
        used = cpu_seconds() - begin
        fault = next(iter(report.faults), None)
        said = "-" if fault is None else f"{fault.case}: {fault.operator or fault.detail.splitlines()[0]}"
        row = [name, *map(str, report.counts.values()), f"{report.seconds:.0f}", f"{used:.0f}", said]
        section.add(row, name=name, **report.counts, seconds=report.seconds, cpu_s=used)
    return section


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(COMPILERS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a folder whose RESULTS.md and RESULTS.json are to have the table")
    options = parser.parse_args()
    section = collect(options.only, options.jobs)
    if options.out is not None:
        write_results([section], options.out)
