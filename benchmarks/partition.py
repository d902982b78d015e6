"""Our partitioners against PyTorch's, on joint graphs that PyTorch captured.

    python -m benchmarks.partition gpt2-24 mlp-800     # all models without arguments

For each model and partitioner: the bytes of activations saved for the backward (inputs apart; memory that several
saved values share counts once), how many values, and the CPU time of a partition, each on a fresh copy of the graph,
the best of some rounds, garbage collected before each. Ratios are ours over PyTorch's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_function
from functorch.compile import default_partition as torch_default
from functorch.compile import min_cut_rematerialization_partition as torch_min_cut
from torch import fx, nn

from benchmarks.common import Section, ratio
from benchmarks.models import build
from foregrad.partitioners import default_partition, min_cut_rematerialization_partition

PARTITIONERS = {
    "default": (default_partition, torch_default),
    "min-cut": (min_cut_rematerialization_partition, torch_min_cut),
}


class _Captured(Exception):
    pass


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}


def capture(function: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, dict[str, Any]]:
    """PyTorch's joint graph of a function, and the keywords that a partitioner is called with."""
    stolen: list[Any] = []

    def steal(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        stolen.extend((joint, keywords))
        raise _Captured

    compiled = aot_function(function, fw_compiler=lambda gm, _: gm, partition_fn=steal, decompositions=_DECOMPOSITIONS)
    try:
        compiled(*args)
    except _Captured:
        pass
    return stolen[0], stolen[1]


def capture_module(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, dict[str, Any]]:
    tensors = dict([*module.named_parameters(), *module.named_buffers()])

    def function(values: list[torch.Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
        out = torch.func.functional_call(module, dict(zip(tensors, values, strict=True)), tuple(args), kwargs)
        return out[0] if not isinstance(out, torch.Tensor) else out

    return capture(function, list(tensors.values()), list(args), kwargs)


def joint_graph(name: str) -> tuple[fx.GraphModule, dict[str, Any]]:
    """The joint graph of the model called `kind-layers`."""
    module, args, kwargs = build(name)
    return capture_module(module, *args, **kwargs)


MODELS = ["gpt2", "llama", "bert", "mlp", "conv"]
DEFAULT = ["gpt2-6", "gpt2-24", "gpt2-96", "llama-8", "llama-24", "bert-6", "conv-16", "mlp-200", "mlp-800"]


# ----------------------------------------------------------------------------------------------------------- measures


def saved_values(forward: fx.GraphModule, count: int) -> list[fx.Node]:
    """What the forward hands to the backward besides inputs, each value once."""
    output = next(iter(reversed(forward.graph.nodes)))
    return [n for n in dict.fromkeys(output.args[0][count:]) if isinstance(n, fx.Node) and n.op != "placeholder"]


def saved_bytes(forward: fx.GraphModule, count: int) -> int:
    """Bytes of the memory behind the saved activations: shared memory once, that of inputs not at all."""
    storages: dict[int, int] = {}
    inputs = {_storage(node) for node in forward.graph.nodes if node.op == "placeholder"}
    for node in saved_values(forward, count):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and _storage(node) not in inputs:
            storages[_storage(node)] = value.untyped_storage().nbytes()
    return sum(storages.values())


def _storage(node: fx.Node) -> int:
    value = node.meta.get("val")
    return id(value) if not isinstance(value, torch.Tensor) else value.untyped_storage()._cdata


def timed(partition: Any, joint: fx.GraphModule, keywords: dict[str, Any], rounds: int) -> tuple[float, Any]:
    """(best CPU seconds, the forward half)."""
    best, forward = float("inf"), None
    for _ in range(rounds):
        fresh = copy.deepcopy(joint)
        gc.collect()
        start = time.process_time()
        forward, _ = partition(fresh, (), **keywords)
        best = min(best, time.process_time() - start)
    return best, forward


def collect(names: list[str], rounds: int) -> Section:
    """The table."""
    section = Section(
        "Partition",
        "On joint graphs that PyTorch captured: MiB of activations saved for the backward (memory that several share "
        "once, inputs not), saved values, and CPU seconds of a partition; each ours / PyTorch's.",
        ["model", "nodes", "partition", "MiB saved", "values saved", "seconds", "ratio of seconds"],
    )
    for name in names:
        joint, keywords = joint_graph(name)
        count = keywords["num_fwd_outputs"]
        for title, (ours, torchs) in PARTITIONERS.items():
            our_s, our_forward = timed(ours, joint, keywords, rounds)
            torch_s, torch_forward = timed(torchs, joint, keywords, min(rounds, 2))
            size = [saved_bytes(half, count) for half in (our_forward, torch_forward)]
            values = [len(saved_values(half, count)) for half in (our_forward, torch_forward)]
            section.add(
                [name, str(len(joint.graph.nodes)), title, " / ".join(f"{n / 2**20:.2f}" for n in size),
                 f"{values[0]} / {values[1]}", f"{our_s:.3f} / {torch_s:.3f}", ratio(our_s, torch_s)],
                model=name, partition=title, bytes=size, values=values, ours_s=our_s, pytorch_s=torch_s,
            )  # fmt: skip
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT, help="name-layers, names: " + ", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inductor", action="store_true", help="decompose operators as Inductor asks for")
    options = parser.parse_args()
    if options.inductor:
        from torch._inductor.decomposition import select_decomp_table

        _DECOMPOSITIONS.update(select_decomp_table())
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    collect(options.models, options.rounds)


if __name__ == "__main__":
    main()
