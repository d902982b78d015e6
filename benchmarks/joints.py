"""Capture of a module's joint graph with descriptors: ours against PyTorch's, and a model that is nowhere in memory.

    python -m benchmarks.joints                # gpt2-12 and llama-8, then a Llama of 80 layers on fakes
    python -m benchmarks.joints llama-8

Seconds of the CPU, the middle of five runs taken in turns, after one run of each. A loss is captured: forward and
backward in one graph, with the parameters and arguments as inputs. The Llama of 80 layers has the widths of the 70
billion parameters, as fakes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch._functorch import aot_autograd as theirs
from torch._subclasses import FakeTensorMode

import foregrad
from benchmarks.models import build, first_tensor

ROUNDS = 5


class Loss(nn.Module):
    """The first result of a model, which takes its arguments by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: Any, kwargs: Any) -> torch.Tensor:
        return first_tensor(self.model(*args, **kwargs))


def exported(door: Any, module: nn.Module, args: tuple[Any, ...]) -> tuple[float, int]:
    """(seconds, nodes)."""
    gc.collect()
    begin = time.process_time()
    with contextlib.ExitStack() as stack:
        jd = door.aot_export_joint_with_descriptors(stack, module, args)
        seconds = time.process_time() - begin
    return seconds, len(jd.graph_module.graph.nodes)


def compared(name: str) -> str:
    model, args, kwargs = build(name)
    module = Loss(model)
    times: dict[Any, list[float]] = {foregrad: [], theirs: []}
    nodes: dict[Any, int] = {}
    for number in range(ROUNDS + 1):
        for door, found in times.items():
            seconds, nodes[door] = exported(door, module, (args, kwargs))
            found += [seconds] if number else []
    ours, other = (statistics.median(times[door]) for door in (foregrad, theirs))
    return f"| {name} | {ours:.3f} | {other:.3f} | {ours / other:.2f} | {nodes[foregrad]} | {nodes[theirs]} |"


def on_fakes(layers: int) -> str:
    """A Llama of this depth, as wide as the one of 70 billion parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    mode = FakeTensorMode()
    with mode:
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(1, 512, dtype=torch.int64)
    module = Loss(model)
    arguments = (tokens,), {"labels": tokens}
    exported(foregrad, module, arguments)  # imports and caches of operators
    seconds, nodes = exported(foregrad, module, arguments)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    return f"| llama of {layers} layers, {billions:.1f} billion parameters, on fakes | {seconds:.2f} | {nodes} |"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["gpt2-12", "llama-8"])
    parser.add_argument("--layers", type=int, default=80)
    wanted = parser.parse_args()
    print(
        "| model | ours, s | PyTorch's, s | ratio | nodes, ours | nodes, PyTorch's |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for name in wanted.models:
        print(compared(name), flush=True)
    if wanted.layers:
        print("\n| model | s | nodes |\n| --- | ---: | ---: |")
        print(on_fakes(wanted.layers))


if __name__ == "__main__":
    main()
