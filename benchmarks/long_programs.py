"""Long programs: a chain of elementwise operators to the end of its first backward, eager kernels.

    python -m benchmarks.long_programs 20000 100000

Each in a process of its own, for its memory; the imports are done before.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import foregrad
from benchmarks.common import Section
from benchmarks.models import build

__all__ = ["DEFAULT", "collect"]

DEFAULT = [20_000, 100_000]


def first_step(operators: int) -> dict[str, float]:
    """CPU seconds of a first forward and backward, and the peak memory of the process in GB."""
    for count in (100, operators):
        module, args, _ = build(f"chain-{count}")
        compiled = foregrad.compile(module, backend="eager")
        start = time.process_time()
        compiled(*args).sum().backward()
    took = time.process_time() - start
    return {"seconds": took, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def collect(counts: list[int]) -> Section:
    """A row for each number of operators."""
    section = Section(
        "Long programs",
        "A chain of elementwise operators to the end of its first backward, eager kernels; one process each. 20,000 "
        "operators should take at most 3 s, 100,000 at most 15 s and 1.2 GB.",
        ["operators", "CPU seconds", "us an operator", "peak, GB"],
    )
    for count in counts:
        command = [sys.executable, "-m", "benchmarks.long_programs", "--alone", str(count)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(told.splitlines()[-1])
        each = found["seconds"] / count * 1e6
        section.add(
            [f"{count:,}", f"{found['seconds']:.1f}", f"{each:.0f}", f"{found['peak_gb']:.2f}"],
            operators=count,
            **found,
        )
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", type=int, default=DEFAULT)
    parser.add_argument("--alone", type=int, help="one program in this process, as JSON")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(first_step(options.alone)))
        return
    collect(options.operators)


if __name__ == "__main__":
    main()
