"""Every op and module of PyTorch's test databases, compiled against eager: `python -m tests.parity.sweep`.

Cases run in worker processes, so that a crash or a hang costs one case. Exit status 1 when any case is WRONG,
ERROR, CRASH or TIMEOUT, or refused for a reason that is not allowed, and not in `known.KNOWN`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import pathlib
import re
import sys
import time
from multiprocessing.connection import wait
from typing import Any

from tests.parity.known import KNOWN
from tests.parity.sweep_report import failures, markdown, summary, unexpected_refusals

START_UP_S = 120.0


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.sweep", description=__doc__)
    parser.add_argument("--op", metavar="REGEX", help="only ops whose name matches (and no modules, unless asked)")
    parser.add_argument("--module", metavar="REGEX", help="only modules whose name matches (and no ops)")
    parser.add_argument("--dtype", action="append", help="default: float32 and int64 (modules: float32)")
    parser.add_argument("--limit", type=int, help="at most this many samples of each case")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which a case takes no new sample")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a case is killed")
    parser.add_argument("--every", type=int, default=1, help="only every n-th case")
    parser.add_argument("--stand-in", help="compile with this stand-in instead of foregrad (see stand_ins.py)")
    parser.add_argument("--json", type=pathlib.Path, help="write every result here")
    parser.add_argument("--markdown", type=pathlib.Path, help="write the summary tables here")
    return parser.parse_args(argv)


def chosen_cases(opts: argparse.Namespace) -> list[Any]:
    from tests.parity.cases import module_cases, op_cases

    dtypes = opts.dtype or ["float32", "int64"]
    everything = opts.op is None and opts.module is None
    cases = []
    if everything or opts.op is not None:
        cases += [case for case in op_cases(dtypes) if re.search(opts.op or "", case.name)]
    if everything or opts.module is not None:
        cases += [case for case in module_cases(dtypes) if re.search(opts.module or "", case.name)]
    return cases[:: opts.every]


# ------------------------------------------------------------------------------------------------ workers
def serve(connection: Any, stand_in: str | None, limit: int | None, budget_s: float) -> None:
    """A worker: cases in, results out, until the pipe closes."""
    if stand_in:
        os.environ["FOREGRAD_STAND_IN"] = stand_in
    import torch

    from tests.parity.cases import run_case

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # PyTorch logs each error that a sample is meant to raise
    connection.send("ready")
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(run_case(case, limit=limit, budget_s=budget_s))


class Worker:
    """A process and the case that it is busy with."""

    def __init__(self, opts: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        given = (theirs, opts.stand_in, opts.limit, opts.budget)
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.case: Any = None
        self.deadline = time.monotonic() + START_UP_S

    def give(self, case: Any, timeout_s: float) -> None:
        self.case = case
        self.deadline = time.monotonic() + timeout_s
        self.connection.send(case)

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def run_all(cases: list[Any], opts: argparse.Namespace) -> list[Any]:
    """All results, in the order of the cases."""
    todo = list(reversed(cases))
    results: list[Any] = []
    workers = [Worker(opts) for _ in range(min(opts.jobs, len(cases)))]
    while workers:
        ready = set(wait([worker.connection for worker in workers], timeout=1.0))
        for position, worker in enumerate(list(workers)):
            answer = collect(worker, worker.connection in ready)
            if answer is None:
                continue
            if not isinstance(answer, str):
                results.append(answer)
                show_progress(answer, len(results), len(cases))
            if answer == "gone" or (not isinstance(answer, str) and answer.status in ("CRASH", "TIMEOUT")):
                worker.stop()
                workers[position] = Worker(opts)
                continue
            if todo:
                worker.give(todo.pop(), opts.timeout)
            else:
                worker.case = None
                worker.deadline = float("inf")
        if len(results) == len(cases):
            break
    for worker in workers:
        worker.stop()
    place = {case: i for i, case in enumerate(cases)}
    return sorted(results, key=lambda result: place[result.case])


def collect(worker: Worker, has_answer: bool) -> Any:
    """A worker's answer: a Result, "ready", "gone" (died at start-up), or None for nothing yet."""
    from tests.parity.cases import CRASH, TIMEOUT, Result

    if has_answer:
        try:
            return worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            if worker.case is None:
                raise RuntimeError("a sweep worker died at start-up") from None
            crashed = Result(worker.case)
            crashed.add(CRASH, f"CRASH exit status {worker.process.exitcode}", "the worker process died")
            return crashed
    if time.monotonic() > worker.deadline:
        if worker.case is None:
            return "gone"
        late = Result(worker.case)
        late.add(TIMEOUT, "TIMEOUT", "killed when its time was up")
        return late
    return None


def show_progress(result: Any, done: int, total: int) -> None:
    if result.status in ("pass", "skip", "refused") and not sys.stderr.isatty():
        return
    line = f"[{done}/{total}] {result.status:8} {result.case}"
    print(line[:150], file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    opts = options(argv)
    cases = chosen_cases(opts)
    if not cases:
        print("no case matches")
        return 2
    started = time.monotonic()
    results = run_all(cases, opts)
    took_s = time.monotonic() - started
    print(summary(results, took_s))
    if opts.json:
        opts.json.parent.mkdir(parents=True, exist_ok=True)
        opts.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    if opts.markdown:
        opts.markdown.parent.mkdir(parents=True, exist_ok=True)
        opts.markdown.write_text(markdown(results, took_s))
    bad = [*failures(results), *unexpected_refusals(results)]
    return 1 if [result for result in bad if str(result.case) not in KNOWN] else 0


if __name__ == "__main__":
    sys.exit(main())
