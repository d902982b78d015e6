"""Thousands of random programs against eager: `python -m tests.parity.fuzz --examples 2000`.

Failures are grouped by what differs, each group shown with its smallest program, ready for `regressions.py`.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import re
import sys
import time
import warnings
from typing import Any

import torch

from tests.parity.oracle import CompiledRaised, Mismatch, Refused, check
from tests.parity.programs import PROFILES, Program, RandomChooser, grow, reduce

# Sums of a few terms in another order differ by a few roundings of the largest of them.
GRAD_SLACK = 32

# Once sizes change in place, views are told to autograd by their places: their gradients are laid out as their base is.
# Those of a tensor that is given other memory are laid out as it was, or as it is.
_RESHAPED = re.compile(r"\.(t|transpose|swapaxes|swapdims|squeeze|unsqueeze|set)_\(|\.data = ")

# Where eager's backward fails and the compiled one does not, of faults of PyTorch's own: a view of a tensor that changed
# its sizes in place since; the real part of a complex tensor that was written since; `as_strided` before the place
# where what it is of begins.
_EAGERS_OWN = (
    "invalid gradient at index",
    "Expected isFloatingType(grad.scalar_type())",
    "invalid storage offset -",
)
_EAGER_FAILS = "Eager fails its own check"


def judge(program: Program, compile: Any = None, grad_slack: int = GRAD_SLACK) -> tuple[str, str]:
    """("equal" | "raised", "") or (a short name for the failure, its message)."""
    f, make_args = program.load()
    strides = not _RESHAPED.search(program.source())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(f, make_args, compile=compile, grad_slack=grad_slack, grad_strides=strides), ""
    except Refused as refusal:
        return f"Refused {_short(str(refusal))}", str(refusal)
    except CompiledRaised as fault:
        cause = fault.__cause__
        return f"Raised {type(cause).__name__}: {_short(str(cause))}", str(fault)
    except Mismatch as difference:
        if any(text in str(difference) for text in _EAGERS_OWN):
            return _EAGER_FAILS, str(difference)
        return f"Mismatch {_kind(str(difference))}", str(difference)
    except Exception as error:
        return f"Harness {type(error).__name__}: {_short(str(error))}", str(error)


def is_fault(verdict: str) -> bool:
    """Whether a verdict is a difference. A refusal by name says what to do instead: it is counted apart."""
    return verdict not in ("equal", "raised", _EAGER_FAILS) and not verdict.startswith("Refused")


def _short(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    return re.sub(r"0x[0-9a-f]+|\d+", "N", lines[0])[:100]


def _kind(text: str) -> str:
    """The stage and the aspects that differ, without the labels."""
    lines = text.splitlines()
    stage = re.sub(r".*call \d+ ", "", lines[0]).split(" from ")[0].rstrip(":")
    parts = [line.strip().split(": ") for line in lines[1:]]
    return f"{stage}: " + ", ".join(sorted({part[1] for part in parts if len(part) > 1}))[:120]


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="programs of each profile")
    parser.add_argument("--profile", action="append", choices=sorted(PROFILES), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", type=int, help="only the program of this number, as a failure shows it")
    parser.add_argument("--stand-in", help="compile with this stand-in instead of foregrad (see stand_ins.py)")
    parser.add_argument("--keep", type=int, default=1, help="programs to show for each group")
    parser.add_argument("--grad-slack", type=int, default=GRAD_SLACK, help="roundings that a gradient may be off")
    parser.add_argument("--no-reduce", action="store_true", help="show programs as they were found")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    opts = options(argv)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # PyTorch logs each error that a program is meant to raise
    if opts.stand_in:
        os.environ["FOREGRAD_STAND_IN"] = opts.stand_in
    verdicts: collections.Counter[str] = collections.Counter()
    groups: dict[str, list[tuple[str, Program]]] = collections.defaultdict(list)
    started = time.monotonic()
    for name in opts.profile or PROFILES:
        first = 1_000_000 * opts.seed + 100_000 * list(PROFILES).index(name)
        for seed in range(first, first + opts.examples) if opts.program is None else [opts.program]:
            program = grow(RandomChooser(seed), PROFILES[name])
            verdict, _ = judge(program, grad_slack=opts.grad_slack)
            verdicts[verdict] += 1
            if verdict not in ("equal", "raised"):
                groups[verdict].append((f"--profile {name} --program {seed}", program))
    for verdict, programs in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"\n=== {verdict} ({len(programs)} programs)")
        for which, program in sorted(programs, key=lambda found: len(found[1].source()))[: opts.keep]:
            print(which)
            if not opts.no_reduce:
                program = smallest(program, verdict, opts.grad_slack)
            print(program)
            print(judge(program, grad_slack=opts.grad_slack)[1][:2000])
    total = sum(verdicts.values())
    failed = sum(count for verdict, count in verdicts.items() if is_fault(verdict))
    refused = total - failed - verdicts["equal"] - verdicts["raised"]
    took_s = time.monotonic() - started
    print(
        f"\n{total} programs in {took_s:.0f} s: {failed} differ, {refused} refused, {verdicts['raised']} rejected by both"
    )
    return 1 if failed else 0


def smallest(program: Program, verdict: str, grad_slack: int = GRAD_SLACK) -> Program:
    """The program with all that can go while its verdict stays."""

    def fails_alike(candidate: Program) -> bool:
        try:
            return judge(candidate, grad_slack=grad_slack)[0] == verdict
        except Exception:
            return False

    return reduce(program, fails_alike)


if __name__ == "__main__":
    sys.exit(main())
