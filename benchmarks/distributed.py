"""Training on several processes of this machine: collectives of a step, its time and its peak of memory, on each rank.

    python -m benchmarks.distributed            # two ranks of gloo
    python -m benchmarks.distributed --ranks 4

Blocks of a transformer are compiled: by us with the eager backend, and by `torch.compile(backend="aot_eager")`.
Collectives are those that the profiler sees in one step, bytes those that a rank hands to gloo in them.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.common import Section, interleaved_once, ratio, write_results
from benchmarks.memory import MIB, peak_of
from tests.distributed import programs
from tests.distributed.ranks import joined
from tests.distributed.traffic import traffic
from tests.distributed.transformer import VOCABULARY, Transformer

PARALLEL = ("tensor", "sequence", "fsdp", "fsdp, mixed", "ddp", "fsdp and tensor")
WIDTH, LAYERS, LENGTH, BATCH = 256, 2, 64, 4


def _aot(model: Any, parallel: Callable[..., Any]) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return parallel(model)


SIDES = {"eager": programs.SIDES["eager"], "ours": programs.SIDES["blocks, then parallel"], "aot_eager": _aot}


def _step(parallel: str, side: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = SIDES[side](Transformer(WIDTH, LAYERS, LENGTH), programs.PARALLEL[parallel])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # what is compiled, and buckets that are laid out once
        step()
    return step


def _measure(parallel: str, rounds: int) -> dict[str, Any]:
    """What this rank sees: for each variant time, peak, collectives; None for one that fails."""
    torch._dynamo.reset()
    steps: dict[str, Callable[[], None]] = {}
    for side in SIDES:
        try:
            steps[side] = _step(parallel, side)
        except Exception as error:
            if side != "aot_eager":
                raise
            print(f"aot_eager fails: {type(error).__name__}: {error}", file=sys.stderr)
    found: dict[str, Any] = {}
    for side, step in steps.items():
        kinds, sizes = traffic(step)
        found[side] = {"kinds": dict(kinds), "bytes": dict(sizes)}
    peaks: dict[str, list[int]] = {side: [] for side in steps}
    for _ in range(rounds):  # peaks vary by a fifth: gloo's threads free their buffers when they come to it
        for side, step in steps.items():
            peaks[side].append(peak_of(step, "cpu"))
    for side, sizes_in_use in peaks.items():
        found[side]["peak"] = statistics.median(sizes_in_use)
    for side, timing in interleaved_once(steps, rounds).items():
        found[side]["seconds"] = timing.median
    return found


def _rank(rank: int, size: int, folder: Path, rounds: int, which: list[str]) -> None:
    warnings.simplefilter("ignore")
    with joined(rank, size, folder / "store", seconds=300):
        for parallel in which:
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, _measure(parallel, rounds))
            if rank == 0:
                (folder / f"{parallel}.json").write_text(json.dumps(everyone))
                print(f"  {parallel}", flush=True)


def collect(size: int, rounds: int) -> Section:
    """The table, of the rank that is worst in each cell."""
    section = Section(
        f"Training on {size} ranks",
        f"One step of a transformer of {LAYERS} blocks, {WIDTH} wide, {BATCH} x {LENGTH} tokens, on {size} processes of this machine, gloo, blocks "
        "compiled with the eager backend (`aot_eager`: by PyTorch's). Collectives of a rank in a step, by kind, and the KiB that "
        "it hands over in them; milliseconds of CPU time (median), and in parentheses the peak in MiB beyond what was "
        "in use before (median); of the rank with the most. Should be: no more collectives, and ratios of at most 1.05.",
        ["parallel", "collectives: eager", "ours", "aot_eager", "step: eager", "ours", "aot_eager", "time: ours/eager", "peak: ours/eager"],
    )  # fmt: skip
    which = [name for name in PARALLEL if size > 2 or name != "fsdp and tensor"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "benchmarks.distributed",
            "--folder",
            name,
            "--rounds",
            str(rounds),
            "--ranks",
            str(size),
        ]
        ranks = [subprocess.Popen([*command, "--rank", str(rank), *which]) for rank in range(size)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError("a rank failed")
        for parallel in which:
            _add(section, parallel, json.loads((folder / f"{parallel}.json").read_text()))
    return section


def _add(section: Section, parallel: str, ranks: list[dict[str, Any]]) -> None:
    def most(side: str, key: str) -> float:
        return max((rank[side][key] for rank in ranks if side in rank), default=0.0)

    def kinds(side: str) -> str:
        largest, sizes = (
            functools.reduce(Counter.__or__, (Counter(rank.get(side, {}).get(key, {})) for rank in ranks))
            for key in ("kinds", "bytes")
        )
        return ", ".join(f"{n} {kind} ({sizes[kind] / 1024:.0f})" for kind, n in sorted(largest.items())) or "-"

    sides = list(SIDES)
    section.add(
        [parallel, *map(kinds, sides), *(f"{most(side, 'seconds') * 1e3:.0f} ({most(side, 'peak') / MIB:.1f})" for side in sides),
         ratio(most("ours", "seconds"), most("eager", "seconds")), ratio(most("ours", "peak"), most("eager", "peak"))],
        parallel=parallel, ranks=ranks,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("which", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank is None:
        write_results([collect(options.ranks, options.rounds)], options.out)
    else:
        _rank(options.rank, options.ranks, options.folder, options.rounds, options.which)


if __name__ == "__main__":
    main()
