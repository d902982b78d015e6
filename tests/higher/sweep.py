"""Every operator of PyTorch's own database differentiated twice, through the compiled function and in eager.

    python -m tests.higher.sweep [--limit N] [--order K] [--only WORD] [--samples N]

Each sample of an operator that has gradients is run through the oracle in float64: values, gradients and gradients
of gradients, with tangents that require gradients themselves. Where eager raises, the compiled function must raise.
Prints each operator that differs, errs or is refused, and the counts.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import warnings
from typing import Any

import torch

from tests.parity.cases import (
    ERROR,
    PASSED,
    REFUSED,
    SKIPPED,
    WORST_FIRST,
    WRONG,
    Case,
    Sample,
    op_cases,
    op_samples,
    ops,
)
from tests.parity.known import UNREPEATABLE
from tests.parity.oracle import CompiledRaised, Mismatch, Refused, check

# Sums of several paths into one tensor are added up in another order than eager's engine does.
TOLERANCE = 1e-9


def run_sample(case: Case, sample: Sample, order: int) -> tuple[str, str]:
    """How one sample came out, and what was said."""
    tolerance = max(TOLERANCE, UNREPEATABLE.get(case.name) or 0.0)
    try:
        verdict = check(
            sample.fn, sample.makers, calls=1, order=order, mutate_outputs=False, grad=sample.grad,
            values=sample.values, atol=tolerance, rtol=tolerance,
        )  # fmt: skip
    except Refused as refusal:
        return REFUSED, str(refusal.reason)
    except CompiledRaised as fault:
        return ERROR, str(fault)
    except Mismatch as difference:
        return WRONG, str(difference)
    return (PASSED if verdict == "equal" else SKIPPED), ""


def run_case(case: Case, order: int, most_samples: int) -> tuple[str, str]:
    """The worst that came of a case's samples."""
    worst, said = SKIPPED, ""
    for index, sample in op_samples(case):
        if index >= most_samples:
            break
        status, text = run_sample(case, sample, order)
        if WORST_FIRST.index(status) < WORST_FIRST.index(worst):
            worst, said = status, f"sample {index}: {text}"
    return worst, said


def chosen(only: str | None, limit: int | None) -> list[Case]:
    table: Any = ops()
    cases = [
        case
        for case in op_cases(["float64"])
        if case.variant == "plain" and table[case.name].supports_autograd and table[case.name].supports_gradgrad
    ]
    if only:
        cases = [case for case in cases if only in case.name]
    if limit and limit < len(cases):
        step = len(cases) / limit
        cases = [cases[int(i * step)] for i in range(limit)]
    return cases


def sweep(cases: list[Case], order: int, samples: int) -> dict[str, list[tuple[str, str]]]:
    """By outcome: (operator, what was said)."""
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            try:
                status, said = run_case(case, order, samples)
            except Exception as error:
                status, said = SKIPPED, f"no samples: {error}"
            found[status].append((case.name, said))
            if status in (WRONG, ERROR, REFUSED):
                print(f"{status:8} {case.name}: {said[:1200]}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="that many operators, spread over the database")
    parser.add_argument("--order", type=int, default=2)
    parser.add_argument("--only", help="operators whose name contains this")
    parser.add_argument("--samples", type=int, default=4, help="samples of each operator, at most")
    opts = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases = chosen(opts.only, opts.limit)
    started = time.monotonic()
    found = sweep(cases, opts.order, opts.samples)
    counts = ", ".join(f"{len(found[s])} {s}" for s in WORST_FIRST if found[s])
    print(f"order {opts.order}: {len(cases)} operators in {time.monotonic() - started:.0f} s: {counts}")
    return 1 if found[WRONG] or found[ERROR] else 0


if __name__ == "__main__":
    sys.exit(main())
