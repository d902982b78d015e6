"""Step time of programs that differentiate more than once: eager against foregrad, with and without Inductor.

    PYTHONPATH=src:. python benchmarks/higher_order.py [--rounds N] [--no-inductor] [--write]

A step is forward, inner derivatives, backward, optimiser, on one thread; CPU time of the process, median of rounds
that take turns. Also what a first-order call costs, and saves for its backward, with and without
`config.higher_order`. `--write` puts the figures into RESULTS.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import foregrad
from benchmarks.common import Section, interleaved_calls, write_results
from tests.higher.programs import ForceField, grad, laplacian, mlp


def pinn(compile: Callable[[Any], Any]) -> Callable[[], None]:
    """The residual of a Poisson equation, its second derivatives taken inside the compiled function."""
    torch.manual_seed(0)
    net = mlp(2, 64, 64, 64, 1).float()
    x = torch.rand(256, 2).requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def residual(x: torch.Tensor) -> torch.Tensor:
        return (laplacian(net(x)[:, 0], x) + x.sin().prod(-1)).pow(2).mean()

    run = compile(residual)

    def step() -> None:
        optimizer.zero_grad()
        run(x).backward()
        optimizer.step()

    return step


def pinn_outside(compile: Callable[[Any], Any]) -> Callable[[], None]:
    """The same, only the network compiled and the derivatives taken outside."""
    torch.manual_seed(0)
    net = mlp(2, 64, 64, 64, 1).float()
    run = compile(net)
    x = torch.rand(256, 2).requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (laplacian(run(x)[:, 0], x) + x.detach().sin().prod(-1)).pow(2).mean().backward()
        optimizer.step()

    return step


def force_field(compile: Callable[[Any], Any]) -> Callable[[], None]:
    """Force matching, the forces taken inside the compiled function."""
    torch.manual_seed(0)
    field = ForceField(32).float()
    x, wanted = torch.randn(24, 3).requires_grad_(), torch.randn(24, 3)
    optimizer = torch.optim.SGD(field.parameters(), 1e-4)
    run = compile(lambda x: -grad(field(x), x))

    def step() -> None:
        optimizer.zero_grad()
        (run(x) - wanted).pow(2).mean().backward()
        optimizer.step()

    return step


def compiled(function: Any) -> Any:
    return foregrad.compile(function, backend="eager")


def with_inductor(function: Any) -> Any:
    return foregrad.compile(function, backend="inductor")


def programs(rounds: int, compilers: dict[str, Callable[[Any], Any]]) -> Section:
    section = Section(
        "Programs that differentiate twice and train",
        "CPU milliseconds of a step, medians. PINN: the Laplacian of a network (256 points, 4 layers of 64), taken "
        "inside the compiled function, or outside of it with only the network compiled. Force field: forces of 24 "
        "atoms, inside. In brackets how many times as fast as eager; with Inductor it should be at least 1.5.",
        ["program", *compilers],
    )
    for program in (pinn, pinn_outside, force_field):
        took = interleaved_calls({name: program(compile) for name, compile in compilers.items()}, rounds, 0.02)
        eager = took["eager"].median
        cells = [f"{timing.median * 1e3:.2f} ({eager / timing.median:.2f}x)" for timing in took.values()]
        section.add(
            [program.__name__.replace("_", " "), *cells],
            program=program.__name__,
            step_ms={name: timing.median * 1e3 for name, timing in took.items()},
        )
    return section


def first_order(rounds: int) -> Section:
    """Small functions, of which the overhead is most, differentiated once."""
    section = Section(
        "What a first derivative pays for the second",
        "CPU microseconds of forward and backward, medians, and the bytes saved for the backward. The two columns "
        "should be the same.",
        ["function", "higher_order=True", "higher_order=False", "ratio", "bytes saved", "bytes without"],
    )
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(10)]
    x = torch.randn(8, 8)

    def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x.sum()

    for title, count in (("1 layer", 1), ("10 layers", 10)):
        calls, saved = {}, {}
        for setting in (True, False):
            with foregrad.config.override(higher_order=setting):
                run = compiled(layers)
                run(x, *weights[:count])
            calls[setting] = lambda run=run, count=count: run(x, *weights[:count]).backward()
            partitioned = run.foregrad.specializations[0].product.compiled.partitioned
            saved[setting] = sum(node.meta["val"].untyped_storage().nbytes() for node in partitioned.saved_tensors)
        took = {setting: timing.median * 1e6 for setting, timing in interleaved_calls(calls, 4 * rounds).items()}
        row = [f"{took[True]:.1f}", f"{took[False]:.1f}", f"{took[True] / took[False]:.3f}"]
        section.add(
            [title, *row, str(saved[True]), str(saved[False])],
            function=title,
            with_us=took[True],
            without_us=took[False],
            saved_bytes=saved[True],
            saved_bytes_without=saved[False],
        )
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compilers = {"eager": lambda f: f, "foregrad": compiled}
    if not options.no_inductor:
        compilers["with Inductor"] = with_inductor
    sections = [programs(options.rounds, compilers), first_order(options.rounds)]
    if options.write:
        write_results(sections, Path(__file__).parent)


if __name__ == "__main__":
    main()
