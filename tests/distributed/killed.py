"""A rank that dies after some steps, by `os._exit`: the other one's next step raises PyTorch's own error, in time."""

import os
import re
import sys

import torch.distributed as dist

from . import programs
from .ranks import joined

SIDE = {"tensor": "parallel, then whole", "fsdp": "parallel, then blocks", "ddp": "blocks, then parallel"}


def main(rank, size, store, parallel):
    with joined(int(rank), int(size), store, seconds=20):
        try:
            for step, _ in zip(range(10), programs.training(parallel, SIDE[parallel]), strict=False):
                if step == 2 and dist.get_rank() == 1:
                    os._exit(9)
        except RuntimeError as error:
            assert type(error).__module__.partition(".")[0] in ("builtins", "torch"), type(error)
            assert re.search("connection closed|reset by peer|timed out|timeout", str(error), re.IGNORECASE), error
            os._exit(0)  # leaving the group would wait for the other
    raise AssertionError("the other rank is gone, and nothing is said")


if __name__ == "__main__":
    main(*sys.argv[1:])
