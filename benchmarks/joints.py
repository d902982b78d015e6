"""Capture of a module's joint graph with descriptors: ours against PyTorch's, and a model that is nowhere in memory.

    python -m benchmarks.joints                # gpt2-12 and llama-8, then a Llama of 80 layers on fakes
    python -m benchmarks.joints llama-8
    python -m benchmarks.joints --out benchmarks

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
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch import aot_autograd as theirs
from torch._subclasses import FakeTensorMode

import foregrad
from benchmarks.common import Section, write_results
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


def against_pytorch(names: list[str]) -> Section:
    section = Section(
        "Capture of joint graphs with descriptors",
        "Seconds of the CPU, the middle of five (`python -m benchmarks.joints`). The loss of each model, at toy width.",
        ["model", "ours, s", "PyTorch's, s", "ratio", "nodes, ours", "nodes, PyTorch's"],
    )
    for name in names:
        compared(section, name)
    return section


def compared(section: Section, name: str) -> None:
    model, args, kwargs = build(name)
    module = Loss(model)
    times: dict[Any, list[float]] = {foregrad: [], theirs: []}
    nodes: dict[Any, int] = {}
    for number in range(ROUNDS + 1):
        for door, found in times.items():
            seconds, nodes[door] = exported(door, module, (args, kwargs))
            found += [seconds] if number else []
    ours, other = (statistics.median(times[door]) for door in (foregrad, theirs))
    counts = nodes[foregrad], nodes[theirs]
    row = [name, f"{ours:.3f}", f"{other:.3f}", f"{ours / other:.2f}", *map(str, counts)]
    section.add(row, name=name, ours_s=ours, pytorch_s=other, nodes=counts)


def on_fakes(layers: int) -> Section:
    """A Llama of this depth, as wide as the one of 70 billion parameters."""
    section = Section(
        "Capture of the joint graph of a model that is nowhere in memory",
        "Seconds of the CPU (`python -m benchmarks.joints`). Parameters and arguments are fakes.",
        ["model", "parameters", "s", "nodes"],
    )
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
    row = [f"llama of {layers} layers", f"{billions:.1f} billion", f"{seconds:.2f}", str(nodes)]
    section.add(row, layers=layers, seconds=seconds, nodes=nodes)
    return section


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["gpt2-12", "llama-8"])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--out", type=Path, help="a folder whose RESULTS.md and RESULTS.json are to have the tables")
    wanted = parser.parse_args()
    sections = [against_pytorch(wanted.models)]
    if wanted.layers:
        sections.append(on_fakes(wanted.layers))
    if wanted.out is not None:
        write_results(sections, wanted.out)


if __name__ == "__main__":
    main()
