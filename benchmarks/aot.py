"""Time of `aot_function` with compilers that do nothing, to the end of the first backward: ours against PyTorch's.

    python -m benchmarks.aot gpt2-12 bert-6     # all models without arguments

A user's own line: parameters are arguments through `functional_call`, both compilers are `nop`, both partitioners of
each side. Caches of operators' results are emptied before each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from functorch import compile as torch_compile

import foregrad
from benchmarks.capture import forget
from benchmarks.common import Section, collect_models, interleaved_once, ratio
from benchmarks.models import build, first_tensor

__all__ = ["collect"]

DEFAULT = ["gpt2-12", "llama-8", "bert-6", "resnet-50", "mlp-200"]
PARTITIONERS = {"default": "default_partition", "min_cut": "min_cut_rematerialization_partition"}


def first_step(doors: Any, name: str, partitioner: str) -> Callable[[], None]:
    """A first forward and backward by the `aot_function` of `doors`."""
    module, args, kwargs = build(name)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])

    def function(values: list[torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        given = dict(zip(tensors, values, strict=True))
        return first_tensor(torch.func.functional_call(module, given, tuple(args), kwargs))

    def run() -> None:
        compiled = doors.aot_function(
            function, doors.nop, doors.nop, partition_fn=getattr(doors, PARTITIONERS[partitioner])
        )
        compiled(list(tensors.values()), list(args), kwargs).sum().backward()

    return run


def collect(names: list[str], rounds: int = 5) -> Section:
    """A row for each model and partitioner."""
    warnings.simplefilter("ignore")
    section = Section(
        "`aot_function` with nop compilers to the end of the first backward",
        "CPU milliseconds, parameters given through `functional_call`, both graphs run once. The ratio should be at most 0.12.",
        ["model", "partition", "ours", "PyTorch", "ratio"],
    )
    for name in names:
        for partitioner in PARTITIONERS:
            variants = {
                "ours": first_step(foregrad, name, partitioner),
                "theirs": first_step(torch_compile, name, partitioner),
            }
            before = dict.fromkeys(variants, forget)
            interleaved_once(variants, 1, before)  # imports what they need
            times = interleaved_once(variants, rounds, before)
            ours, theirs = times["ours"], times["theirs"]
            section.add(
                [name, partitioner, ours.text(1e-3, 0), theirs.text(1e-3, 0), ratio(ours.median, theirs.median)],
                model=name, partition=partitioner, ours_s=ours.median, pytorch_s=theirs.median,
            )  # fmt: skip
    return section


if __name__ == "__main__":
    collect_models(__doc__, collect, DEFAULT)
