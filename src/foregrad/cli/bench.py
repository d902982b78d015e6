"""`foregrad bench FILE.py:NAME`: a step, forward and backward, eager and compiled, in turn."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import foregrad
from foregrad.cli.screen import add_json, choose_screen, print_json
from foregrad.cli.target import Target, add_target, load_target
from foregrad.explanation.measure import step_of
from foregrad.explanation.subject import subject_of


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "bench",
        help="time a step of a function, eager and compiled, in turn",
        description="Times calls with their backward, eager and compiled by each backend, in turn; the backward starts "
        "from ones for all outputs. Exit status: 0, 2 no such target, 3 it can't be compiled.",
        epilog="example: foregrad bench model.py:net --backend eager,inductor --steps 50",
    )
    add_target(parser)
    parser.add_argument("--steps", type=int, default=20, help="steps of each (default: 20)")
    add_json(parser)
    parser.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> int:
    """Run the command."""
    target = load_target(options)
    steps = {"pytorch": _step(target, None)}
    steps |= {f"foregrad, {name}": _step(target, name) for name in options.backend.split(",")}
    screen = choose_screen(plain=False, out=sys.stderr)
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in steps}
    with screen.progress("steps", (options.steps + 1) * len(steps)) as advance:
        done = 0
        for number in range(options.steps + 1):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                took = time.perf_counter() - begin
                times[name].append(took) if number else first.setdefault(name, took)
                done += 1
                advance(done, name)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    base = median["pytorch"]
    results: list[dict[str, Any]] = [
        {"name": name, "first_s": first[name], "median_s": median[name], "ratio": median[name] / base} for name in steps
    ]
    if options.json:
        print_json(results)
        return 0
    rows = [
        (one["name"], f"{one['first_s']:.2f} s", f"{one['median_s'] * 1e3:.2f} ms", f"{one['ratio']:.2f}")
        for one in results
    ]
    choose_screen(plain=False).table(f"{options.steps} steps of each", ("", "first", "median", "ratio"), rows)
    return 0


def _step(target: Target, backend: str | None) -> Callable[[], None]:
    """One call with its backward, on copies of the function and its arguments."""
    subject = subject_of(target.function, target.args, target.kwargs)
    call = subject.function if backend is None else foregrad.compile(subject.function, backend=backend)
    return step_of(functools.partial(call, *subject.args, **subject.kwargs), subject.forget_gradients)
