"""What a call costs that has no graph because the function is past a limit, beside eager's.

    python -m benchmarks.past_limits
    python -m benchmarks.run past-limits   # into RESULTS.md

Five functions with more paths or sizes than graphs are allowed for: a batch norm that averages all batches, crops by
drawn boxes, a mixture of experts, non-maximum suppression, as many tensors as come. Each is called 120 times; then 200
calls are timed in turn with eager's (CPU time, the best of three rounds). "beyond": microseconds beyond 1.3 times
eager's, which are to be at most 20 for a call that has no graph.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import foregrad
from benchmarks.common import Section

CALLS = 200


def crops(x: torch.Tensor, boxes: torch.Tensor) -> Any:
    return sum(x[:, first:last].sum() for first, last in boxes.tolist())


def mixture_of_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    chosen = (x @ w).argmax(-1)
    out = torch.zeros_like(x)
    for expert in range(w.shape[1]):
        rows = chosen == expert
        if rows.any():
            out[rows] = x[rows] * (expert + 1)
    return out


def suppression(scores: torch.Tensor) -> torch.Tensor:
    kept = []
    while scores.shape[0] > 0:
        kept.append(scores[0])
        rest = scores[1:]
        scores = rest[(rest - kept[-1]).abs() > 0.3]
    return torch.stack(kept).sum()


def as_many_as_come(*tensors: torch.Tensor) -> Any:
    return sum(tensor.sum() for tensor in tensors)


def boxes() -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.randint(0, 20, (3, 1))
    return torch.randn(4, 32), torch.cat([first, first + torch.randint(1, 10, (3, 1))], 1)


def some(whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return whole[: random.randint(2, 60)].unbind()


def rows() -> list[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]]:
    norm, batch, weights, whole = (
        torch.nn.BatchNorm1d(8, momentum=None),
        torch.randn(16, 8),
        torch.randn(8, 4),
        torch.randn(64, 8),
    )
    return [
        ("batch norm, average of all", norm, lambda: (batch,)),
        ("as many tensors as come", as_many_as_come, lambda: some(whole)),
        ("mixture of experts", mixture_of_experts, lambda: (torch.randn(6, 8), weights)),
        ("crops by drawn boxes", crops, boxes),
        ("non-maximum suppression", suppression, lambda: (torch.rand(12),)),
    ]


def seconds(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> float:
    begin = time.process_time()
    for args in arguments:
        function(*args)
    return (time.process_time() - begin) / len(arguments)


def collect(calls: int = CALLS) -> Section:
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    section = Section(
        "Calls past a limit",
        "Functions with more paths or sizes than graphs are allowed for, after 120 calls: microseconds a call, the best of "
        "three rounds in turn with eager. *beyond*: beyond 1.3 times eager's, which is to be at most 20.",
        ["function", "eager, us", "foregrad, us", "ratio", "beyond, us", "graphs", "eager calls"],
    )
    for name, function, make in rows():
        compiled = foregrad.compile(function, backend="eager")
        for _ in range(120):
            compiled(*make())
        arguments = [make() for _ in range(calls)]
        times = [(seconds(function, arguments), seconds(compiled, arguments)) for _ in range(3)]
        eager, ours = (1e6 * min(column) for column in zip(*times, strict=True))
        graphs = len(list(compiled.foregrad.all_specializations()))
        count = sum(entry.count for entry in compiled.foregrad.recompiles().eager)
        beyond = ours - 1.3 * eager
        section.add(
            [name, f"{eager:.1f}", f"{ours:.1f}", f"{ours / eager:.2f}", f"{beyond:.1f}", str(graphs), str(count)],
            eager=eager,
            ours=ours,
            graphs=graphs,
            eager_calls=count,
        )
    return section


if __name__ == "__main__":
    collect()
