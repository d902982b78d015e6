"""What `import foregrad` adds to `import torch`: each import in a process of its own, in turns.

python -m benchmarks.startup
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.common import Section

__all__ = ["collect"]

_SCRIPT = """
import time
import torch
before = set(__import__("sys").modules)
start = time.process_time()
{statement}
took = time.process_time() - start
print(took, len(set(__import__("sys").modules) - before))
"""

_STATEMENTS = ["import foregrad", "from foregrad import compile", "import functorch.compile", "import torch._dynamo"]


def collect(rounds: int) -> Section:
    """The table."""
    section = Section(
        "Import",
        "Milliseconds that the import adds to `import torch`, and how many modules it brings; should be at most 150 for foregrad, whose "
        "parts are imported when they are first asked for: `compile` brings what a call needs.",
        ["statement", "least / median", "modules"],
    )
    found: dict[str, list[tuple[float, int]]] = {statement: [] for statement in _STATEMENTS}
    for _ in range(rounds):
        for statement, times in found.items():
            done = subprocess.run(
                [sys.executable, "-c", _SCRIPT.format(statement=statement)], capture_output=True, text=True, check=True
            )
            took, count = done.stdout.split()
            times.append((float(took) * 1e3, int(count)))
    for statement, times in found.items():
        took = [t for t, _ in times]
        section.add(
            [f"`{statement}`", f"{min(took):.0f} / {statistics.median(took):.0f}", str(times[0][1])],
            statement=statement,
            ms=statistics.median(took),
        )
    return section


if __name__ == "__main__":
    collect(5)
