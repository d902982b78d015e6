"""What the guards cost, beside the whole call.

    python benchmarks/guards.py            # all rows
    python benchmarks/guards.py --rounds 9

For each function: the CPU time of its guards alone (the rendered lines up to where the graph would run), of the whole
compiled call, and of the eager call; medians of interleaved rounds, in microseconds. The guards are those of the
compiled function itself, cut off in front of the run, so that nothing is measured that users don't run. `Python`: the
guards without the C++ part.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import foregrad
from foregrad.graph.source import compile_source


class Block(nn.Module):
    """A transformer block: 12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.0)
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.drop(self.project(torch.softmax(q @ k.mT * self.scale, -1) @ v))
        return x + self.drop(self.down(torch.relu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """12 blocks, embedding, positions, norm and head: 150 parameters in 89 modules."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.positions = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(12))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean()


def ten(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def rows() -> list[tuple[str, Any, tuple[Any, ...]]]:
    linear = nn.Linear(4, 4)
    model = Transformer()
    assert len(list(model.parameters())) == 150
    return [
        ("one tensor", torch.sin, (torch.ones(4, 4),)),
        ("10 tensors", ten, tuple(torch.ones(4, 4) for _ in range(10))),
        ("a module of 2 parameters", linear, (torch.ones(2, 4),)),
        ("a module of 150 parameters", model, (torch.arange(8).expand(2, 8),)),
        ("the same, without gradients", model, (torch.arange(8).expand(3, 8),)),
    ]


def guards_of(compiled: Any) -> Callable[..., Any]:
    """The guards of the last specialization, as a function that returns None where the graph would run."""
    specialization = compiled.foregrad.specializations[-1]
    source = specialization.source().split("def call(args, kwargs):")[1]
    guards, _, _ = source.partition("        return MISS\n")
    text = f"def call(args, kwargs):{guards}        return MISS\n"
    return compile_source(text, "call", dict(specialization.call.__globals__), label="guards")


def measure(rounds: int, works: list[Callable[[], Any]]) -> list[float]:
    """Median microseconds of each, in interleaved rounds of some milliseconds."""
    counts = []
    for work in works:
        start = time.process_time()
        for _ in range(20):
            work()
        counts.append(max(10, int(20 * 0.01 / max(time.process_time() - start, 1e-9))))
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, count, found in zip(works, counts, times, strict=True):
            start = time.process_time()
            for _ in range(count):
                work()
            found.append((time.process_time() - start) / count * 1e6)
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}; CPU microseconds, medians of {options.rounds} rounds")
    print(f"{'':32}{'guards':>10}{'Python':>10}{'call':>12}{'eager':>12}")
    for name, function, args in rows():
        works: list[Callable[[], Any]] = []
        with torch.set_grad_enabled("without" not in name):
            for native in (False, True):
                with foregrad.config.override(native=native):
                    compiled = foregrad.compile(function, backend="eager")
                compiled(*args)
                guards = guards_of(compiled)
                assert guards(args, {}) is None
                works.append(lambda guards=guards: guards(args, {}))  # type: ignore[misc] # noqa: B023
            works += [lambda: compiled(*args), lambda: function(*args)]  # noqa: B023
            python, check, call, eager = measure(options.rounds, works)
        print(f"{name:32}{check:10.2f}{python:10.2f}{call:12.1f}{eager:12.1f}")


if __name__ == "__main__":
    main()
