"""What a call costs beyond its graphs: ours, PyTorch's AOTAutograd, and the floor, in one process.

    python -m benchmarks.overhead tiny layers      # all cases without arguments
    python -m benchmarks.overhead --dynamo         # behind torch.compile, against PyTorch's AOTAutograd behind it

Overhead is the time of a call less that of the bare graph callables. All three run the code that our eager backend
writes for their graphs. The floor is a bare `torch.autograd.Function` round our graphs, written by hand, with the `copy_` or the
view that nobody can avoid, and no guards: below it is only C++.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functorch.compile import aot_function

import foregrad
from benchmarks.common import Section, interleaved_calls, ratio, write_results
from foregrad._torch.native import native

__all__ = ["CASES", "collect", "collect_behind_dynamo"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, its arguments, and what the floor does with the forward graph's outputs afterwards."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], list[torch.Tensor]]
    finish: Callable[[tuple[Any, ...], list[torch.Tensor]], Any] = lambda outs, args: outs
    hidden: int = 0  # outputs at the front that are new values of inputs
    grad: bool = True


def _tiny(x: Any, w: Any, b: Any) -> Any:
    return torch.sin(x @ w + b)


def _many(*tensors: Any) -> Any:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total, total * 2


def _layers(x: Any, *weights: Any) -> Any:
    for weight in weights:
        x = torch.relu(x @ weight)
    return x


def _mutation(x: Any, state: Any, w: Any) -> Any:
    state.add_(1.0)
    return torch.sin(x * w) * state


def _aliased(x: Any, w: Any) -> Any:
    y = x * w
    return y[0], y[1]


def _parameters(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def _written(outs: tuple[Any, ...], args: list[torch.Tensor]) -> Any:
    args[1].copy_(outs[0])
    return outs[1:]


CASES = [
    Case("tiny: sin(x @ w + b), 2 parameters", _tiny, lambda: [torch.randn(4, 4), *_parameters((4, 4), (4,))]),
    Case("13 inputs, 2 outputs", _many, lambda: _parameters(*[(8,)] * 13)),
    Case("100 layers, 100 parameters", _layers, lambda: [torch.randn(4, 4), *_parameters(*[(4, 4)] * 100)]),
    Case("input mutated", _mutation, lambda: [torch.randn(4), torch.zeros(4), *_parameters((4,))], _written, 1),
    Case(
        "two outputs over one intermediate",
        _aliased,
        lambda: [torch.randn(2, 4), *_parameters((2, 4))],
        lambda outs, args: (outs[0][0], outs[0][1]),
    ),
    Case("inference: no_grad", _tiny, lambda: [torch.randn(4, 4), *_parameters((4, 4), (4,))], grad=False),
]


def _flat(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [t for t in out if t.requires_grad]


def _floor(forward: Any, backward: Any, case: Case, signature: Any) -> Callable[..., Any]:
    """By hand: the least that connects two graphs to autograd."""
    shown = signature.num_forward_outputs

    class Floor(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outs = forward(list(args))
            ctx.save_for_backward(*outs[shown:])
            if case.hidden:
                ctx.mark_non_differentiable(*outs[: case.hidden])
            ctx.set_materialize_grads(False)
            return tuple(outs[:shown])

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            values = [*ctx.saved_tensors, *tangents[case.hidden :]]
            ctx.maybe_clear_saved_tensors()
            return tuple(backward(values))

    apply = super(torch.autograd.Function, Floor).apply

    def call(*args: Any) -> Any:
        return case.finish(apply(*args), args)  # type: ignore[arg-type]

    return call


class _Raw:
    """Forward and backward graph callables, with inputs to call them on alone."""

    def __init__(self, forward: Any, backward: Any, saved_from: int, inputs: list[Any], tangents: int) -> None:
        inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
        with torch.no_grad():
            outs = forward(list(inputs))
            saved = list(outs[saved_from:])
            given = [torch.ones_like(t) for t in outs[saved_from - tangents : saved_from]]
        self.run_forward = lambda: forward(list(inputs))
        self.run_both = lambda: (forward(list(inputs)), backward([*saved, *given]))
        if backward is None:
            self.run_both = self.run_forward


def _our_code(gm: Any, _: Any) -> Any:
    return foregrad.make_boxed_func(gm)


def variants(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Functions of no arguments: (forward alone, forward and backward)."""
    args = case.arguments()
    with foregrad.config.override(native=True):
        ours = foregrad.compile(case.function, backend="nop")
    with foregrad.config.override(native=False):
        python = foregrad.compile(case.function, backend="nop")
    # PyTorch's wrapper is given the same code for its graphs as ours: only what is round them differs.
    theirs = aot_function(case.function, _our_code, _our_code)
    callables = {"eager": case.function, "ours": ours, "python": python, "theirs": theirs}
    with torch.set_grad_enabled(case.grad):
        for call in (ours, python, theirs):
            out = call(*args)
            if case.grad:
                sum(t.sum() for t in _flat(out)).backward()
    (specialization,) = ours.foregrad.specializations
    compiled = specialization.product.compiled
    signature = specialization.product.captured.joint.signature
    if case.grad:
        backward = compiled.make_backward()
        callables["floor"] = _floor(compiled.forward, backward, case, signature)
        raw = _Raw(
            compiled.forward, backward, signature.num_forward_outputs, args, len(signature.gradients.differentiable)
        )
    else:
        backward = None
        callables["floor"] = lambda *args: compiled.forward(list(args))[0]
        raw = _Raw(compiled.forward, None, 1, args, 0)
    forward = {name: (lambda call=call: call(*args)) for name, call in callables.items()}
    grads = [a for a in args if a.requires_grad]

    def both(call: Any) -> Any:
        if not case.grad:
            return lambda: call(*args)
        seeds = [torch.ones_like(t) for t in _flat(call(*args))]
        return lambda: torch.autograd.grad(_flat(call(*args)), grads, seeds)

    whole = {name: both(call) for name, call in callables.items()}
    forward["raw"], whole["raw"] = raw.run_forward, raw.run_both
    return forward, whole


def collect(names: list[str], rounds: int) -> Section:
    """The table."""
    warnings.simplefilter("ignore")
    section = Section(
        "Overhead of a call",
        "Microseconds, medians; overhead is over our graphs alone, guards included. `ours/floor` should be at most 1.15. "
        + ("`Python`: ours without its C++ part." if native() else "The C++ part was not built."),
        ["case", "pass", "eager", "graphs", "ours", "Python", "floor", "PyTorch", "ours - graphs", "Python - graphs",
         "floor - graphs", "PyTorch - graphs", "ours/floor", "Python/floor", "ours/PyTorch"],
    )  # fmt: skip
    for case in CASES:
        if names and not any(name in case.name for name in names):
            continue
        with torch.set_grad_enabled(case.grad):
            for title, which in zip(("forward", "forward + backward"), variants(case), strict=True):
                if not case.grad and title != "forward":
                    continue
                t = {name: timing.median * 1e6 for name, timing in interleaved_calls(which, rounds).items()}
                over = {name: t[name] - t["raw"] for name in ("ours", "python", "floor", "theirs")}
                section.add(
                    [case.name, title, *(f"{t[n]:.1f}" for n in ("eager", "raw", "ours", "python", "floor", "theirs")),
                     *(f"{over[n]:.1f}" for n in ("ours", "python", "floor", "theirs")),
                     ratio(over["ours"], over["floor"]), ratio(over["python"], over["floor"]),
                     ratio(over["ours"], over["theirs"])],
                    case=case.name, phase=title, **{f"{n}_us": v for n, v in t.items()},
                )  # fmt: skip
    return section


def collect_behind_dynamo(names: list[str], rounds: int) -> Section:
    """The table of calls behind `torch.compile`, whose guards both have."""
    from torch._dynamo.backends.common import aot_autograd

    warnings.simplefilter("ignore")
    section = Section(
        "Overhead of a call behind Dynamo",
        "Microseconds of a call, least / median; both run the code that our eager backend writes for their graphs.",
        ["case", "pass", 'backend="foregrad"', "AOTAutograd", "ratio of the least"],
    )
    theirs = aot_autograd(fw_compiler=_our_code, bw_compiler=_our_code)
    for case in CASES:
        if names and not any(name in case.name for name in names):
            continue
        torch._dynamo.reset()
        args = case.arguments()
        grads = [a for a in args if a.requires_grad]
        calls = {
            "ours": torch.compile(case.function, backend="foregrad", options={"backend": "nop"}),
            "theirs": torch.compile(case.function, backend=theirs),
        }
        with torch.set_grad_enabled(case.grad):
            seeds = [torch.ones_like(t) for t in _flat(case.function(*args))]

            def forward(call: Any, args: list[torch.Tensor] = args) -> Any:
                return call(*args)

            def both(call: Any, args: Any = args, grads: Any = grads, seeds: Any = seeds) -> Any:
                return torch.autograd.grad(_flat(call(*args)), grads, seeds)

            passes = {"forward": forward, "forward + backward": both} if case.grad else {"forward": forward}
            for title, run in passes.items():
                t = interleaved_calls({n: functools.partial(run, call) for n, call in calls.items()}, rounds)
                least = ratio(t["ours"].least, t["theirs"].least)
                section.add(
                    [case.name, title, t["ours"].text(1e-6), t["theirs"].text(1e-6), least],
                    case=case.name, phase=title, ours_us=t["ours"].least * 1e6, theirs_us=t["theirs"].least * 1e6,
                )  # fmt: skip
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dynamo", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    section = (collect_behind_dynamo if options.dynamo else collect)(options.cases, options.rounds)
    if options.write:
        write_results([section], Path(__file__).parent)


if __name__ == "__main__":
    main()
