"""Calls with many sizes or numbers behind Dynamo, all of them: ours against PyTorch's `aot_eager`.

    python -m benchmarks.lengths --steps 30     # three to four CPU minutes, a row at a time

CPU seconds of all calls with their backwards, from a Dynamo that knows nothing, in one process and in turns; and the
number of our captures beside the number of Dynamo's graphs: no backend can do with fewer captures. Two steps of each
kind come first, for imports.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

import foregrad
from benchmarks.common import Section, interleaved_once, ratio
from benchmarks.first_step import forget_all
from benchmarks.models import build
from foregrad import extend

__all__ = ["collect"]

SIDES: dict[str, Callable[..., Any]] = {
    "ours": lambda model, dynamic: torch.compile(model, backend="foregrad", dynamic=dynamic, options=EAGER),
    "aot_eager": lambda model, dynamic: torch.compile(model, backend="aot_eager", dynamic=dynamic),
    "eager": lambda model, dynamic: model,
}
EAGER: Any = {"backend": "eager"}


class Captures(extend.Watcher):
    """Counts captures."""

    def __init__(self) -> None:
        self.count = 0

    def stage(self, stage: extend.CompileStage) -> None:
        self.count += stage.name == "capture"


class Scaled(torch.nn.Module):
    """Eight layers, each scaled by a number that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu() * scale
        return x.sum()


def lengths(steps: int) -> tuple[Any, Iterable[Any]]:
    """A language model, and for each step a text of another length."""
    model = build("gpt2-4")[0]
    return (lambda ids: model(ids, labels=ids).loss), ((torch.randint(0, 512, (2, 20 + n)),) for n in range(steps))


def batches(steps: int) -> tuple[Any, Iterable[Any]]:
    """The same, and another number of texts in each third step."""
    model, sizes = build("gpt2-4")[0], [(2 + n // 3, 20 + n) for n in range(steps)]
    return (lambda ids: model(ids, labels=ids).loss), ((torch.randint(0, 512, size),) for size in sizes)


def numbers(steps: int) -> tuple[Any, Iterable[Any]]:
    """Layers scaled by another number in each step."""
    return Scaled(), ((torch.randn(4, 32), 0.5 + n / 8) for n in range(steps))


PROGRAMS = {"lengths": lengths, "lengths and batches": batches, "a float": numbers}


def train(
    compile: Callable[[Any], Any], program: Callable[[], tuple[Any, Iterable[Any]]], counts: list[tuple[int, int]]
) -> float:
    """The seconds of all steps; `counts` gets the numbers of captures and of Dynamo's graphs."""
    function, calls = program()
    compiled, spent, counter = compile(function), 0.0, Captures()
    torch._dynamo.utils.counters.clear()
    with extend.watching(counter):
        for args in calls:
            started = time.process_time()
            compiled(*args).backward()
            spent += time.process_time() - started
    counts.append((counter.count, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return spent


def collect(steps: int = 30, rounds: int = 1) -> Section:
    warnings.simplefilter("ignore")
    section = Section(
        "Sizes and numbers that vary, behind Dynamo",
        f"CPU seconds of {steps} steps, each with another length (GPT-2, 4 layers): `torch.compile` with "
        '`backend="foregrad"`, with `aot_eager`, and eager. The ratio should be at most 0.60, with '
        "2 captures where Dynamo makes 2 graphs.",
        ["program", "dynamic", *SIDES, "captures", "Dynamo's graphs", "ours/aot_eager"],
    )
    for compile in SIDES.values():
        for program in PROGRAMS.values():
            train(functools.partial(compile, dynamic=None), functools.partial(program, 2), [])
    for name, program in PROGRAMS.items():
        for dynamic in (None, True):
            counts: dict[str, list[tuple[int, int]]] = {side: [] for side in SIDES}
            variants = {
                side: functools.partial(
                    train, functools.partial(compile, dynamic=dynamic), functools.partial(program, steps), counts[side]
                )
                for side, compile in SIDES.items()
            }
            before = dict.fromkeys(variants, forget_all)
            times = interleaved_once(variants, rounds, before)
            ours, theirs, (captures, graphs) = times["ours"].median, times["aot_eager"].median, max(counts["ours"])
            columns = [*(times[s].text(1, 2) for s in SIDES), str(captures), str(graphs), ratio(ours, theirs)]
            section.add(
                [name, str(dynamic), *columns],
                program=name, dynamic=dynamic, ours_s=ours, aot_eager_s=theirs, eager_s=times["eager"].median,
                captures=captures, graphs=graphs,
            )  # fmt: skip
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    foregrad.config.on_unsupported = "raise"
    collect(options.steps, options.rounds)


if __name__ == "__main__":
    main()
