"""Programs of several processes, each a rank of a gloo group on this machine."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc

import torch
import torch.distributed as dist

from tests import forked

__all__ = ["joined", "run", "trains_as_eager"]


def trains_as_eager(folder, size, steps, *programs, seconds=300):
    """Run programs of `programs.py` on each rank, and raise where one is not as eager's."""
    codes, said = run("programs", size, folder, str(steps), *programs, seconds=seconds)
    assert codes == [0] * size, "\n".join(said)


def run(program, size, folder, *arguments, seconds=240):
    """Run `python -m tests.distributed.<program> rank size store ...` on each rank: their exit codes, and all output."""
    store = str(folder / f"store of {program}")
    outputs = [folder / f"{program} {rank}" for rank in range(size)]
    ranks = [
        forked.start(f"tests.distributed.{program}", [str(rank), str(size), store, *arguments], str(output))
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [rank.wait(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return codes, [output.read_text() for output in outputs]


@contextlib.contextmanager
def joined(rank, size, store, seconds=120):
    """Context: this process is a rank of the default group.

    What is left of modules is collected before the group is given up: where one of `fully_shard` or of
    `DistributedDataParallel` outlives it, a thread of gloo's may drop what it holds of Python's while the interpreter
    ends, and the process aborts, in eager too.
    """
    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()
