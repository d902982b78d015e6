"""Every benchmark, into `benchmarks/RESULTS.md` and `RESULTS.json`: what `make bench` runs.

python -m benchmarks.run                 # all of them, twenty minutes
python -m benchmarks.run overhead chains # some
python -m benchmarks.run --quick         # fewer rounds and smaller models

The section `gpu` is run where there is one; JAX is compared with where it is installed.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import (
    aot,
    budget,
    capture,
    comparison,
    composite,
    demo,
    distributed,
    explain,
    first_minute,
    first_step,
    graph_code,
    jax_capture,
    lengths,
    long_programs,
    memory,
    overhead,
    partition,
    past_limits,
    shares,
    startup,
    verify,
)
from benchmarks.common import Section, write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="the sections: import, overhead, ...")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of each capture")
    parser.add_argument("--models", nargs="*", default=capture.DEFAULT, help="to capture, as name-layers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    quick = options.quick
    models = ["gpt2-6", "mlp-200"] if quick else options.models
    benchmarks: dict[str, Callable[[], list[Section]]] = {
        "comparison": lambda: [comparison.collect()],
        "demo": lambda: [demo.collect(20 if quick else 200)],
        "import": lambda: [startup.collect(3 if quick else 7)],
        "first-minute": lambda: first_minute.collect(1 if quick else 3),
        "overhead": lambda: [overhead.collect([], 20 if quick else 60)],
        "code": lambda: [graph_code.collect(20 if quick else 60)],
        "capture": lambda: capture.collect(models, 1 if quick else options.rounds),
        "aot": lambda: [aot.collect(["mlp-200"] if quick else aot.DEFAULT, 1 if quick else options.rounds)],
        "shares": lambda: [shares.collect(["mlp-200"] if quick else aot.DEFAULT, 1 if quick else options.rounds)],
        "long": lambda: [long_programs.collect([2_000] if quick else long_programs.DEFAULT)],
        "chains": lambda: [capture.collect_chains(1 if quick else min(options.rounds, 2))],
        "first-step": lambda: [first_step.collect(models, 1 if quick else options.rounds)],
        "large": lambda: [first_step.collect_large(1)],
        "dynamic": lambda: [capture.collect_dynamic(models, 1 if quick else min(options.rounds, 2))],
        "batches": lambda: [capture.collect_batches(models, 1 if quick else options.rounds)],
        "lengths": lambda: [lengths.collect(8 if quick else 30)],
        "jax": lambda: [jax_capture.collect(6 if quick else 12, 1 if quick else options.rounds)],
        "partition": lambda: [partition.collect(models, 1 if quick else options.rounds)],
        "composite": lambda: [composite.collect(20 if quick else 60)],
        "past-limits": lambda: [past_limits.collect(20 if quick else past_limits.CALLS)],
        "steps": lambda: [memory.collect_steps(2 if quick else 7, models)],
        "budget": lambda: [budget.collect(name) for name in (["gpt2-6"] if quick else budget.DEFAULT)],
        "budget-inductor": lambda: [budget.collect_inductor(["gpt2-6"] if quick else list(budget.WITH_INDUCTOR))],
        "ranks": lambda: [distributed.collect(2, 3 if quick else 15)],
        "explain": lambda: [explain.collect_explain(["gpt2"] if quick else list(explain.ARCHITECTURES))],
        "verify": lambda: [verify.collect(1 if quick else 7)],
        "growth": lambda: [memory.collect_growth(5_000 if quick else 100_000)],
    }
    if torch.cuda.is_available():
        benchmarks["gpu"] = lambda: [memory.collect_steps(5 if quick else 20, models, "cuda")]
    for name, run in benchmarks.items():
        if options.which and name not in options.which:
            continue
        print(f"==> {name}", flush=True)
        write_results(run(), options.out)


if __name__ == "__main__":
    main()
