"""PyTorch's operator database under autocast and with arguments of two dtypes, through a foreign compiler.

`python -m tests.parity.mixed_precision autocast` (or `mixed`) runs all of it; 20 CPU minutes each.
"""

from __future__ import annotations

import collections
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

import foregrad
from tests.parity.cases import (
    PASSED,
    REFUSED,
    SKIPPED,
    Case,
    Result,
    Sample,
    make_call,
    op_cases,
    op_samples,
    run_sample,
)
from tests.parity.oracle import Call


def compile(fn: Any) -> Any:
    return foregrad.aot_function(fn, foregrad.nop)


def under_autocast(fn: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(*args, **kwargs)

    return call


def autocast(case: Case) -> Iterator[Sample]:
    for _, sample in op_samples(case):
        yield Sample(under_autocast(sample.fn), sample.makers, sample.values, sample.grad)


def mixed(case: Case) -> Iterator[Sample]:
    """The first tensor in bfloat16, then all others; what eager refuses is left out."""
    for _, sample in op_samples(case):
        call = sample.makers[0]()
        count = sum(is_low(leaf) for leaf in pytree.tree_leaves((call.args, call.kwargs)))
        for which in ({0}, set(range(1, count))) if count > 1 else ():
            given = lowered(call, which)
            try:
                with torch.no_grad():
                    sample.fn(*lowered(call, which).args, **given.kwargs)
            except Exception:
                continue
            makers = [functools.partial(make_call, given, case.variant == "in-place", other) for other in (False, True)]
            yield Sample(sample.fn, makers, sample.values, sample.grad)


def is_low(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32


def lowered(call: Call, which: set[int]) -> Call:
    """The arguments with those of the float32 tensors that `which` numbers in bfloat16."""
    number = iter(range(1000))

    def low(leaf: Any) -> Any:
        if is_low(leaf) and next(number) in which:
            return leaf.detach().to(torch.bfloat16).requires_grad_(leaf.requires_grad)
        return leaf

    args, kwargs = pytree.tree_map(low, (call.args, call.kwargs))
    return Call(args, kwargs)


KINDS: dict[str, Callable[[Case], Iterator[Sample]]] = {"autocast": autocast, "mixed": mixed}


def run(kind: str, case: Case, *, limit: int, budget_s: float = 5.0) -> Result:
    result, started = Result(case), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, sample in enumerate(KINDS[kind](case)):
            if index >= limit or time.perf_counter() - started > budget_s:
                break
            run_sample(result, index, sample, compile)
    return result


def main(kind: str) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for case in op_cases(["float32"]):
        result = run(kind, case, limit=5)
        counts.update(result.counts)
        if result.status not in (PASSED, SKIPPED, REFUSED):
            print(case, *result.messages.values(), sep="\n  ", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1])
