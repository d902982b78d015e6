"""Time from a call to its forward and backward graphs, compiled by nothing: ours against PyTorch's AOTAutograd.

    python -m benchmarks.capture gpt2-12 mlp-200     # all models without arguments

Both have a compiler that is no part of them and returns the graph module it is given.
Ours is everything that happens before the first run: capture, partition, guards, rendered runtime, and the backward
handed to its compiler, though that waits for a backward by default. PyTorch's ends when its forward compiler is
called: both graphs are there by then, and its backward too is compiled when first needed.
Caches of operators' results are emptied before each ("cold"); "warm" is ours with them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_function
from functorch.compile import default_partition as torch_default
from functorch.compile import min_cut_rematerialization_partition as torch_min_cut
from torch.utils._pytree import tree_map

import foregrad
from benchmarks.common import Section, Timing, interleaved_once, ratio
from benchmarks.models import build, first_tensor
from foregrad.frontend.call import flatten_call

__all__ = ["DEFAULT", "collect", "collect_batches", "collect_chains", "collect_dynamic"]

DEFAULT = ["gpt2-6", "gpt2-12", "gpt2-24", "llama-8", "bert-6", "resnet-50", "mlp-200"]
CHAINS = ["chain-1000", "chain-5000", "chain-20000"]


def untouched(gm: Any, _: Any) -> Any:
    """A compiler of one's own, that compiles nothing."""
    return gm


def our_capture(name: str, policy: str, dynamic: bool = False) -> Callable[[], float]:
    module, args, kwargs = build(name)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return first_tensor(module(*args, **kwargs))

    def run() -> float:
        compiled = foregrad.compile(loss, backend=(untouched, untouched), partition=policy, dynamic=dynamic)
        dispatcher: Any = compiled.foregrad
        start = time.process_time()
        specialization = dispatcher.specializer.specialize(flatten_call(loss, args, kwargs), ())
        specialization.product.compiled.make_backward()
        return time.process_time() - start

    return run


def captures_of_batches(name: str) -> Callable[[], tuple[float, float]]:
    """Seconds of two captures by one function: the first, and with symbolic sizes that for a second batch size."""
    module, args, kwargs = build(name)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return first_tensor(module(*args, **kwargs))

    calls = [(args, kwargs), tree_map(lambda t: torch.cat([t, t[:1]]), (args, kwargs))]

    def run() -> tuple[float, float]:
        dispatcher: Any = foregrad.compile(loss, backend=(untouched, untouched), partition="default").foregrad
        made: list[Any] = []
        times = []
        for args, kwargs in calls:
            gc.collect()
            start = time.process_time()
            made.append(dispatcher.specializer.specialize(flatten_call(loss, args, kwargs), made))
            made[-1].product.compiled.make_backward()
            times.append(time.process_time() - start)
        if not made[1].product.captured.joint.signature.symbols:
            raise RuntimeError(f"no size of {name} is symbolic in its second graph")
        return times[0], times[1]

    return run


def their_capture(name: str, partition: Callable[..., Any], dynamic: bool = False) -> Callable[[], float]:
    module, args, kwargs = build(name)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])

    def function(values: list[torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        return first_tensor(
            torch.func.functional_call(module, dict(zip(tensors, values, strict=True)), tuple(args), kwargs)
        )

    def run() -> float:
        stamps: list[float] = []

        def compiler(gm: Any, _: Any) -> Any:
            stamps.append(time.process_time())
            return gm

        compiled = aot_function(
            function, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, dynamic=dynamic
        )
        start = time.process_time()
        compiled(list(tensors.values()), list(args), kwargs)
        return stamps[0] - start

    return run


def forget() -> None:
    """Empty the caches of operators' results."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()
    try:
        from foregrad.tracing.kernels.metadata import forget_all
    except ImportError:
        return
    forget_all()


def nodes(name: str, policy: str) -> str:
    module, args, kwargs = build(name)
    joint = foregrad.capture(lambda *a, **k: first_tensor(module(*a, **k)), *args, **kwargs)
    halves = foregrad.partition(joint, policy)
    return f"{len(halves.forward.graph.nodes)}/{len(halves.backward.graph.nodes)}"


def collect(names: list[str], rounds: int) -> list[Section]:
    """Both tables."""
    warnings.simplefilter("ignore")
    section = Section(
        "From a call to forward and backward",
        "Seconds. Compilers of one's own that return the graph module; caches emptied first, but for the column `warm`. "
        "The ratio should be at most 0.15.",
        ["model", "partition", "nodes", "ours", "ours, warm", "PyTorch", "ratio"],
    )
    for name in names:
        for policy, theirs in (("default", torch_default), ("min_cut", torch_min_cut)):
            ours = our_capture(name, policy)
            times = interleaved_once(
                {"ours": ours, "warm": ours, "theirs": their_capture(name, theirs)},
                rounds,
                {"ours": forget, "theirs": forget},
            )
            section.add(
                [
                    name,
                    policy,
                    nodes(name, policy),
                    times["ours"].text(1, 3),
                    times["warm"].text(1, 3),
                    times["theirs"].text(1, 3),
                    ratio(times["ours"].median, times["theirs"].median),
                ],
                model=name,
                partition=policy,
                ours_s=times["ours"].median,
                warm_s=times["warm"].median,
                pytorch_s=times["theirs"].median,
            )
    return [section]


def collect_dynamic(names: list[str], rounds: int) -> Section:
    """The same with every size of the arguments symbolic."""
    warnings.simplefilter("ignore")
    section = Section(
        "From a call to forward and backward, symbolic sizes",
        "Seconds. Nop compilers, default partition; sizes of arguments are symbols (PyTorch's: those of parameters "
        "too). The ratio should be at most 0.20.",
        ["model", "ours", "PyTorch", "ratio"],
    )
    for name in names:
        variants = {"ours": our_capture(name, "default", True), "theirs": their_capture(name, torch_default, True)}
        try:
            times = interleaved_once(variants, rounds, dict.fromkeys(variants, forget))
        except Exception as error:
            section.add([name, "-", "-", f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"], model=name)
            continue
        ours, theirs = times["ours"], times["theirs"]
        section.add(
            [name, ours.text(1, 3), theirs.text(1, 3), ratio(ours.median, theirs.median)],
            model=name, ours_s=ours.median, pytorch_s=theirs.median,
        )  # fmt: skip
    return section


def collect_batches(names: list[str], rounds: int) -> Section:
    """What a second batch size costs: its capture is the one with symbolic sizes that serves all others, too."""
    warnings.simplefilter("ignore")
    section = Section(
        "A second batch size",
        "Seconds, nop compilers, default partition, everything imported; caches of operators' results are emptied before the "
        "first capture. The second has symbolic sizes, and serves every batch size after it. The ratio should be at most 1.5.",
        ["model", "first batch size", "second", "ratio"],
    )
    for name in names:
        run = captures_of_batches(name)
        run()  # imports what it needs
        rows = []
        for _ in range(rounds):
            forget()
            rows.append(run())
        first, second = (Timing(min(times), statistics.median(times)) for times in zip(*rows, strict=True))
        section.add(
            [name, first.text(1, 3), second.text(1, 3), ratio(second.median, first.median)],
            model=name, first_s=first.median, second_s=second.median,
        )  # fmt: skip
    return section


def collect_chains(rounds: int) -> Section:
    """Whether time grows with the number of operators and no faster."""
    section = Section(
        "Linear in the number of operators",
        "A chain of elementwise operators, default partition; microseconds for each operator of the forward.",
        ["operators", "ours", "us an operator"],
    )
    for name in CHAINS:
        count = int(name.partition("-")[2])
        times = interleaved_once({"ours": our_capture(name, "default")}, rounds, {"ours": forget})
        each = times["ours"].median / count
        section.add([str(count), times["ours"].text(1, 3), f"{each * 1e6:.1f}"], operators=count, us_each=each * 1e6)
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    parser.add_argument("--batches", action="store_true", help="what a second batch size costs")
    options = parser.parse_args()
    if options.batches:
        collect_batches(options.models, options.rounds)
        return
    if options.dynamic:
        collect_dynamic(options.models, options.rounds)
        return
    collect(options.models, options.rounds)
    collect_chains(min(options.rounds, 3))


if __name__ == "__main__":
    main()
