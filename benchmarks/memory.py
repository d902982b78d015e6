"""A training step, eager, ours and PyTorch's: its time, its peak of memory, the bytes it saves for the backward.

    python -m benchmarks.memory

Peaks on the CPU are from the allocator's own reports to the profiler, in a run apart from those that are timed; on a
GPU from its allocator. Also what a compiled function holds beyond its graphs, and whether that grows with calls.
"""

from __future__ import annotations

import gc
import resource
import warnings
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func
from functorch.compile import default_partition as torch_default
from functorch.compile import min_cut_rematerialization_partition as torch_min_cut

import foregrad
from benchmarks.common import Section, interleaved_once, ratio
from benchmarks.models import build, first_tensor
from foregrad._torch.native import native as native_part

__all__ = ["collect_growth", "collect_steps"]

MIB = 1 << 20


def _boxed(gm: Any, _: Any) -> Any:
    return make_boxed_func(gm.forward)


def _step(call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
    def step() -> None:
        out = first_tensor(call(*args, **kwargs))
        (out if out.ndim == 0 else out.sum()).backward()
        for parameter in module.parameters():
            parameter.grad = None

    return step


def _pytorch(module: torch.nn.Module, partition: Callable[..., Any]) -> Callable[..., Any]:
    tensors = dict([*module.named_parameters(), *module.named_buffers()])

    def function(values: list[torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        return first_tensor(torch.func.functional_call(module, dict(zip(tensors, values, strict=True)), args, kwargs))

    compiled = aot_function(function, fw_compiler=_boxed, bw_compiler=_boxed, partition_fn=partition)
    return lambda *args, **kwargs: compiled(list(tensors.values()), args, kwargs)


def _variants(name: str, device: str) -> dict[str, Callable[[], None]]:
    steps = {}
    for key in ("eager", "default", "min_cut", "PyTorch", "PyTorch min_cut"):
        module, args, kwargs = build(name)
        module = module.to(device)
        args = tuple(a.to(device) for a in args)
        kwargs = {k: v.to(device) for k, v in kwargs.items()}
        call: Any = module
        if key in ("default", "min_cut"):
            call = foregrad.compile(module, backend="eager", partition=key)
        elif key != "eager":
            call = _pytorch(module, torch_min_cut if "min_cut" in key else torch_default)
        steps[key] = _step(call, module, args, kwargs)
        steps[key]()
    return steps


def peak_of(step: Callable[[], None], device: str) -> int:
    """Bytes that a step has in use at once, beyond what was in use before it."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def saved_by(name: str, policy: str) -> int:
    """Bytes saved for the backward besides inputs, each memory once."""
    module, args, kwargs = build(name)
    call = foregrad.compile(module, backend="eager", partition=policy)
    given = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers(), *args, *kwargs.values()]}
    out = first_tensor(call(*args, **kwargs))
    node: Any = out.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in node.saved_tensors}
    return sum(size for address, size in found.items() if address not in given)


def collect_steps(rounds: int, models: list[str], device: str = "cpu") -> Section:
    """The table of steps."""
    warnings.simplefilter("ignore")
    section = Section(
        "A training step" + ("" if device == "cpu" else f" on {torch.cuda.get_device_name()}"),
        "Forward and backward with the eager backend (PyTorch: its own code for the graph): milliseconds (median) and, in parentheses, the peak in MiB beyond "
        "what was in use before. `saved` is what ours saves for the backward besides inputs, in MiB. Ratios are of time.",
        ["model", "eager", "default", "min_cut", "PyTorch", "PyTorch min_cut", "saved: default, min_cut",
         "ours/eager", "ours/PyTorch"],
    )  # fmt: skip
    for name in models:
        steps = _variants(name, device)
        timed = steps if device == "cpu" else {key: _synchronized(step) for key, step in steps.items()}
        t = {key: value.median * 1e3 for key, value in interleaved_once(timed, rounds).items()}
        peak = {key: peak_of(step, device) / MIB for key, step in steps.items()}
        saved = [saved_by(name, policy) / MIB for policy in ("default", "min_cut")]
        section.add(
            [name, *(f"{t[key]:.1f} ({peak[key]:.1f})" for key in steps), ", ".join(f"{s:.1f}" for s in saved),
             ratio(t["default"], t["eager"]), ratio(t["default"], t["PyTorch"])],
            model=name, device=device, saved_mib=saved,
            **{f"{key}_ms": v for key, v in t.items()}, **{f"{key}_peak_mib": v for key, v in peak.items()},
        )  # fmt: skip
    return section


def _synchronized(step: Callable[[], None]) -> Callable[[], float]:
    """On a GPU the time that counts is that on its clock."""

    def run() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return run


def _resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def collect_growth(calls: int) -> Section:
    """What many calls leave behind."""
    section = Section(
        "Memory after many calls",
        "A function of 2 parameters, forward and backward: Python objects that the compiled function brought beyond "
        "those of its graphs' nodes, and what further calls added. Both growths should be about zero.",
        ["calls", "through", "objects held", "objects more after the calls", "MiB resident more after the calls"],
    )
    x, w, b = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)

    def function(x: Any, w: Any, b: Any) -> Any:
        return torch.sin(x @ w + b).sum()

    for native in (True, False):
        if native and native_part() is None:
            continue
        with foregrad.config.override(native=native):
            foregrad.compile(function, backend="eager")(x, w, b).backward()  # what the first compilation of all leaves
            w.grad = b.grad = None
            gc.collect()
            start = len(gc.get_objects())
            compiled = foregrad.compile(function, backend="eager")

        def run(times: int, compiled: Any = compiled) -> None:
            for _ in range(times):
                compiled(x, w, b).backward()
            w.grad = b.grad = None

        run(100)
        gc.collect()
        held, resident = len(gc.get_objects()), _resident()
        run(calls)
        gc.collect()
        more, grown = len(gc.get_objects()) - held, (_resident() - resident) / MIB
        section.add(
            [str(calls), "C++" if native else "Python", str(held - start), str(more), f"{grown:.2f}"],
            calls=calls, native=native, objects_held=held - start, objects_more=more, mib_more=grown,
        )  # fmt: skip
    return section


if __name__ == "__main__":
    torch.set_num_threads(1)
    collect_growth(100_000)
    collect_steps(5, ["gpt2-6", "mlp-200"])
    if torch.cuda.is_available():
        collect_steps(20, ["gpt2-6", "mlp-200"], "cuda")
