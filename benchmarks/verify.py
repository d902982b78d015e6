"""`foregrad.verify` against a normal compilation of the same model: `python -m benchmarks.verify [--rounds N]`.

The model is a GPT of 479 operators. CPU seconds, medians of runs in turn; a normal compilation is capture, partition,
both halves and one step.
"""

import argparse
import statistics
import time
from typing import Any

import torch

import foregrad
from tests.verification import planted

CASES = {
    "nothing wrong": {"backend": "eager"},
    "a wrong decomposition": {
        "backend": "eager",
        "decompositions": {torch.ops.aten.gelu.default: planted.gelu_by_a_sigmoid},
    },
    "a backend that miscompiles": {"backend": planted.miscompiles_gelu},
    "... only the second of its kind": {"backend": planted.miscompiles_the_second_gelu},
    "a wrong partition": {"backend": "eager", "partition": planted.partition_that_changes_a_gradient},
}


def compiled(model: torch.nn.Module, args: tuple[torch.Tensor, ...], how: dict[str, Any]) -> None:
    foregrad.compile(model, **how)(*args).backward()
    model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    model, args = planted.gpt()
    print(f"{'':<34} {'compile':>9} {'verify':>9} {'ratio':>6}  first operator that is wrong, operators in the program")
    for name, how in CASES.items():
        times = {"compile": [], "verify": []}
        for _ in range(rounds + 1):
            begin = time.process_time()
            compiled(model, args, how)
            times["compile"].append(time.process_time() - begin)
            begin = time.process_time()
            found = foregrad.verify(model, *args, **how)
            times["verify"].append(time.process_time() - begin)
        first, second = (statistics.median(seconds[1:]) for seconds in times.values())
        what = "-" if found.culprit is None else f"{found.culprit.node}, {found.culprit.piece.size}"
        print(f"{name:<34} {first:>7.3f} s {second:>7.3f} s {second / first:>6.1f}  {what}")


if __name__ == "__main__":
    main()
