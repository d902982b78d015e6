"""Time from a call to the end of its first backward, with eager's kernels: ours against PyTorch's `aot_eager`.

    python -m benchmarks.first_step gpt2-12 mlp-200     # the usual models without arguments
    python -m benchmarks.first_step --large             # 100,000 operators, 5,000 parameters
    python -m benchmarks.first_step mlp-200 --device cuda

Seconds are CPU time of the process, on a GPU those of the wall clock with all kernels done. In the first table both compile in one process, in turns; caches are emptied before
each. Each row of the second has a process of its own, in which a small function was compiled before: memory is how far
the process's peak rose from there to the end of the first backward.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import foregrad
from benchmarks.capture import forget
from benchmarks.common import Section, interleaved_once, ratio
from benchmarks.inductor import seconds
from benchmarks.models import build, first_tensor

__all__ = ["DEFAULT", "LARGE", "collect", "collect_large"]

DEFAULT = ["gpt2-12", "llama-8", "bert-6", "resnet-50", "mlp-200"]
LARGE = {"chain-100000": "at most 10 s and 1,200 MB", "parameters-5000": "at most 5 s"}


def first_step(name: str, compile: Callable[[Any], Any], device: str) -> Callable[[], Any]:
    """A function that compiles a model's loss anew, runs its first forward and backward, and gives the seconds."""
    built = build(name)
    module, (args, kwargs) = built[0].to(device), tree_map_only(torch.Tensor, lambda value: value.to(device), built[1:])

    def run() -> float:
        def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            return first_tensor(module(*args, **kwargs)).sum()

        module.zero_grad()
        started = seconds(device)
        compile(loss)(*args, **kwargs).backward()
        return seconds(device) - started

    return run


def forget_all() -> None:
    torch._dynamo.reset()
    forget()


def collect(names: list[str], rounds: int, device: str = "cpu") -> Section:
    """Whole models, side by side."""
    warnings.simplefilter("ignore")
    section = Section(
        "To the end of the first backward, eager kernels",
        'CPU seconds: `foregrad.compile(backend="eager")` and `torch.compile(backend="aot_eager")`. '
        "The ratio should be at most 0.10.",
        ["model", "ours", "aot_eager", "ratio"],
    )
    for name in names:
        variants = {
            "ours": first_step(name, lambda loss: foregrad.compile(loss, backend="eager"), device),
            "theirs": first_step(name, lambda loss: torch.compile(loss, backend="aot_eager"), device),
        }
        interleaved_once(variants, 1)  # imports what both need
        times = interleaved_once(variants, rounds, dict.fromkeys(variants, forget_all))
        ours, theirs = times["ours"], times["theirs"]
        section.add(
            [name, ours.text(1, 3), theirs.text(1, 3), ratio(ours.median, theirs.median)],
            model=name, ours_s=ours.median, pytorch_s=theirs.median,
        )  # fmt: skip
    return section


def measure_large(name: str) -> dict[str, float]:
    """Seconds of the forward call and of the backward, and by how many MB the process grew."""
    warnings.simplefilter("ignore")
    foregrad.compile(lambda x: (x * 2).sin().sum(), backend="eager")(torch.ones(4, requires_grad=True)).backward()
    module, args, kwargs = build(name)
    compiled = foregrad.compile(lambda *args, **kwargs: first_tensor(module(*args, **kwargs)).sum(), backend="eager")
    before, start = _peak_mb(), time.process_time()
    loss = compiled(*args, **kwargs)
    called = time.process_time()
    loss.backward()
    return {"forward_s": called - start, "backward_s": time.process_time() - called, "mb": _peak_mb() - before}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def collect_large(rounds: int) -> Section:
    """Very many operators, and very many parameters."""
    section = Section(
        "Large graphs, to the end of the first backward",
        "CPU seconds and MB, medians; eager kernels, default partition, a process each.",
        ["graph", "forward", "backward", "MB", "should be"],
    )
    for name, bound in LARGE.items():
        code = f"import json; from benchmarks.first_step import measure_large as m; print(json.dumps(m({name!r})))"
        found = []
        for _ in range(rounds):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        row = {key: statistics.median(one[key] for one in found) for key in found[0]}
        section.add(
            [name, f"{row['forward_s']:.2f}", f"{row['backward_s']:.2f}", f"{row['mb']:.0f}", bound], graph=name, **row
        )
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--large", action="store_true", help="100,000 operators, 5,000 parameters")
    options = parser.parse_args()
    if options.large:
        collect_large(options.rounds)
    else:
        collect(options.models, options.rounds, options.device)


if __name__ == "__main__":
    main()
