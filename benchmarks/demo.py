"""`foregrad demo`, as `make demo` runs it: python -m benchmarks.demo"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.common import Section

__all__ = ["collect"]


def collect(steps: int) -> Section:
    """The table."""
    section = Section(
        "The demo",
        "`foregrad demo`: a GPT of 636,032 weights, dropout on, trained on the sources of Python's standard library (so the loss is that of this Python), on one thread. Wall-clock times, steps in turns. README quotes it.",
        ["", "eager", "foregrad"],
    )
    command = [sys.executable, "-m", "foregrad", "demo", "--json", "--steps", str(steps), "--seconds", "120"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    step, saved, operators = found["median_step_s"], found["saved_bytes"], found["operators"]
    sides = ("eager", "foregrad")
    rows = [
        ["steps", str(found["steps"]), str(found["steps"])],
        ["final loss", *(f"{found['loss'][side]:.6f}" for side in sides)],
        ["median step", *(f"{step[side] * 1e3:.1f} ms" for side in sides)],
        ["median step against eager", "1.00", f"{step['foregrad'] / step['eager']:.2f}"],
        ["capture and compile", "-", f"{found['compile_s'] * 1e3:.1f} ms"],
        ["bytes saved for backward", *(f"{saved[side] / 2**20:.2f} MiB" for side in sides)],
        *(["operators in the joint graph" if half == "joint" else f"operators in the {half} half", "-", str(count)]
          for half, count in operators.items()),
        ["bitwise equal", "", "yes" if found["difference"] is None else "no"],
    ]  # fmt: skip
    for row in rows:
        section.add(row, what=row[0])
    return section


if __name__ == "__main__":
    collect(200)
