"""A language model called with many lengths behind Dynamo, all of it: ours against PyTorch's `aot_eager`.

    python -m benchmarks.lengths gpt2-4 --lengths 30

CPU seconds of all calls with their backwards, from a Dynamo that knows nothing, in one process and in turns.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import foregrad
from benchmarks.common import Section, interleaved_once, ratio
from benchmarks.first_step import forget_all
from benchmarks.models import build

__all__ = ["collect"]

SIDES: dict[str, Callable[[Any], Any]] = {
    "ours": lambda model: torch.compile(model, backend="foregrad", options={"backend": "eager"}),
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
    "eager": lambda model: model,
}


def train(model: Any, compile: Callable[[Any], Any], lengths: int) -> float:
    """The seconds of a step with each length."""
    compiled, spent = compile(model), 0.0
    for length in range(20, 20 + lengths):
        ids = torch.randint(0, 512, (2, length))
        model.zero_grad()
        started = time.process_time()
        compiled(ids, labels=ids).loss.backward()
        spent += time.process_time() - started
    return spent


def collect(name: str = "gpt2-4", lengths: int = 30, rounds: int = 3) -> Section:
    warnings.simplefilter("ignore")
    section = Section(
        "Many lengths behind Dynamo, eager kernels",
        f'CPU seconds of {lengths} steps, each with another length: `torch.compile` with `backend="foregrad"`, with '
        "`aot_eager`, and eager.",
        ["model", *SIDES, "ours/aot_eager"],
    )
    model = build(name)[0]
    variants = {side: functools.partial(train, model, compile, lengths) for side, compile in SIDES.items()}
    interleaved_once(variants, 1, dict.fromkeys(variants, forget_all))  # imports what they need
    times = interleaved_once(variants, rounds, dict.fromkeys(variants, forget_all))
    ours, theirs = times["ours"].median, times["aot_eager"].median
    section.add(
        [name, *(times[side].text(1, 2) for side in SIDES), ratio(ours, theirs)],
        model=name, ours_s=ours, aot_eager_s=theirs, eager_s=times["eager"].median,
    )  # fmt: skip
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt2-4")
    parser.add_argument("--lengths", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    foregrad.config.on_unsupported = "raise"
    collect(options.model, options.lengths, options.rounds)


if __name__ == "__main__":
    main()
