"""`foregrad.verify` against a normal compilation of the same model: `python -m benchmarks.verify [--rounds N]`.

The model is a GPT of 479 operators, with and without a planted fault.
"""

import argparse
from typing import Any

import torch

import foregrad
from benchmarks.common import Section, interleaved_once
from tests.tools.verification import planted

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


def collect(rounds: int = 7) -> Section:
    """The table."""
    section = Section(
        "What verify takes",
        "CPU seconds, medians of runs in turn, of `foregrad.verify` on a GPT of 479 operators with a planted fault, and of a normal compilation with one step: capture, partition, both halves. The ratio should be at most 3.",
        ["fault", "compilation", "verify", "ratio", "first operator that is wrong", "operators in the program"],
    )
    model, args = planted.gpt()
    for name, how in CASES.items():
        found: list[foregrad.Verification] = []
        variants = {
            "compile": lambda how=how: compiled(model, args, how),
            "verify": lambda how=how, found=found: found.append(foregrad.verify(model, *args, **how)),
        }
        interleaved_once(variants, 1)
        times = interleaved_once(variants, rounds)
        first, second = times["compile"].median, times["verify"].median
        culprit = found[-1].culprit
        what = ("-", "-") if culprit is None else (culprit.node, str(culprit.piece.size))
        section.add(
            [name, f"{first:.3f}", f"{second:.3f}", f"{second / first:.1f}", *what],
            fault=name, compile_s=first, verify_s=second, culprit=what[0],
        )  # fmt: skip
    return section


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    collect(parser.parse_args().rounds)
