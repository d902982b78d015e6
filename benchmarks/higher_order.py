"""Step time of programs that differentiate more than once: eager against foregrad, with and without Inductor.

    python benchmarks/higher_order.py [--rounds N] [--no-inductor]

A step is forward, inner derivatives, backward, optimiser, on one thread; CPU time of the process, median of rounds
that take turns. Also the cost of a first-order call with and without `config.higher_order`, and of `value_and_grad`
over its graph.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import foregrad
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


def cpu_s(call: Callable[[], Any], times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - started) / times


def take_turns(calls: dict[str, Callable[[], Any]], rounds: int, times: int) -> dict[str, float]:
    """The median seconds of each call, after one round to warm up."""
    for call in calls.values():
        cpu_s(call, max(2, times // 4))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(cpu_s(call, times))
    return {name: statistics.median(values) for name, values in found.items()}


def compiled(function: Any) -> Any:
    return foregrad.compile(function, backend="eager")


def with_inductor(function: Any) -> Any:
    return foregrad.compile(function, backend="inductor")


def show_programs(rounds: int, compilers: dict[str, Callable[[Any], Any]]) -> None:
    for program in (pinn, pinn_outside, force_field):
        calls = {name: program(compile) for name, compile in compilers.items()}
        took = take_turns(calls, rounds, 5)
        columns = [f"{name} {s * 1e3:7.2f} ms {took['eager'] / s:5.2f}x" for name, s in took.items()]
        print(f"{program.__name__:14} {'  '.join(columns)}", flush=True)


def show_overhead(rounds: int) -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(8, 8)
    calls = {}
    for setting in (True, False):
        with foregrad.config.override(higher_order=setting):
            run = compiled(lambda x: torch.tanh(x @ weight).sum())
            run(x)
        calls[f"first order, higher_order={setting}"] = lambda run=run: run(x).backward()
    step = foregrad.value_and_grad(lambda x: (x * x).sum(), backend="eager")
    step(x)
    graph = step.foregrad.specializations[0].product.compiled.forward
    calls["value_and_grad"] = lambda: step(x)
    calls["its graph alone"] = lambda: graph([x])
    for name, took in take_turns(calls, rounds, 2000).items():
        print(f"{name:34} {took * 1e6:7.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-inductor", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compilers = {"eager": lambda f: f, "foregrad": compiled}
    if not options.no_inductor:
        compilers["with Inductor"] = with_inductor
    show_programs(options.rounds, compilers)
    show_overhead(options.rounds)


if __name__ == "__main__":
    main()
