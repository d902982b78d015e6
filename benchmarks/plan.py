"""What `foregrad.plan` foresees, beside what allocators and others have measured.

    python -m benchmarks.plan                # all of it, some minutes
    python -m benchmarks.plan peaks          # peaks of whole steps on the CPU, beside the allocator's
    python -m benchmarks.plan large          # 70 and 405 billion parameters on `meta`: seconds and memory
    python -m benchmarks.plan published      # memory of runs that torchtitan has published
    python -m benchmarks.plan largest        # the largest batch, found from few captures and by trying
    python -m benchmarks.plan --out benchmarks

Peaks on the CPU are of forward, backward and the optimizer's step, beyond parameters, buffers, arguments and the state of
the optimizer, after a first step. Nothing is fitted: what the published runs have beside what is foreseen is said by name.
"""

from __future__ import annotations

import argparse
import functools
import gc
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import foregrad
from benchmarks.common import Section, write_results
from foregrad.partitioners.policies import Policy
from foregrad.planning import DEVICES
from foregrad.planning.choices import borders_of, layer_of
from foregrad.planning.step import loss_in, step_of
from foregrad.planning.work import layers_of, work_of
from tests.models.zoo import WITHOUT_ATTENTION, ZOO
from tests.parity.peak import peak_of

GIB = 1 << 30
ARCHITECTURES = (
    "gpt2",
    "bert",
    "roberta",
    "albert",
    "distilbert",
    "llama",
    "mistral",
    "qwen2",
    "opt",
    "t5",
    "vit",
    "convnext",
)
BUDGET = functools.partial(foregrad.budget_partition, memory_budget=0.2)
PARTITIONS: dict[str, Any] = {"default": "default", "min_cut": "min_cut", "budget 0.2": BUDGET}
OPTIMIZERS = ("SGD", "AdamW", "Adagrad")

# --------------------------------------------------------------------------------------------------------- peaks


def wider(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the zoo, and inputs eight times as many, so that values outweigh single numbers."""
    entry = ZOO[name]
    inputs = {
        key: value.repeat(8, *[1] * (value.dim() - 1)) if isinstance(value, torch.Tensor) else value
        for key, value in entry.inputs().items()
    }
    return entry.build("eager" if name in WITHOUT_ATTENTION else "sdpa"), inputs


def foreseen_and_measured(name: str, partition: Any, optimizer: str) -> tuple[int, int]:
    """Bytes at the peak of a whole step, beyond what stands."""
    model, inputs = wider(name)
    found = foregrad.plan(model, **inputs, optimizer=optimizer, device="cpu", policies={"it": partition})
    memory = found.choice("it").memory
    assert memory is not None
    compiled = foregrad.compile(lambda: loss_in(model(**inputs), name), backend="eager", partition=partition)
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)

    def step() -> None:
        compiled().backward()
        steps.step()
        steps.zero_grad()

    step()
    step()
    gc.collect()
    return memory.peak - found.standing.total, peak_of(step)


def peaks(architectures: Sequence[str] = ARCHITECTURES) -> Section:
    """The table of peaks: of each model and partition, the optimizer that is furthest off."""
    section = Section("What plan foresees: peaks on the CPU", _PEAKS, ["model, partition", *OPTIMIZERS, "furthest off"])
    for name in architectures:
        for partition, policy in PARTITIONS.items():
            pairs = [foreseen_and_measured(name, policy, optimizer) for optimizer in OPTIMIZERS]
            worst = max((foreseen / measured - 1 for foreseen, measured in pairs), key=abs)
            cells = [f"{foreseen} / {measured}" for foreseen, measured in pairs]
            section.add([f"{name}, {partition}", *cells, f"{worst:.2%}"], pairs=pairs, worst=worst)
    return section


_PEAKS = (
    "Bytes at the peak of a whole step (forward, backward, the optimizer's step) beyond parameters, buffers, arguments and "
    "the optimizer's state: foreseen / by the allocator's reports, after two steps. Models of two layers, batch 16; the "
    "budget is a fifth of the way from the least peak to that of saving everything."
)


# --------------------------------------------------------------------------------------------------------- large models


class Attention(nn.Module):
    """Attention over grouped heads with rotations, as many heads as its parameters have."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size, linear = width // heads, functools.partial(nn.Linear, bias=False)
        self.wq, self.wo = linear(width, width), linear(width, width)
        self.wk, self.wv = linear(width, groups * self.size), linear(width, groups * self.size)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.size) for layer in (self.wq, self.wk, self.wv))
        q, k = (turned(t, turns) for t in (q, k))
        k, v = (repeated(t, q.shape[2] // t.shape[2]) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(found.transpose(1, 2).reshape(batch, length, -1))


class Norm(nn.Module):
    """torchtitan's: computed in single precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.w1, self.w2, self.w3 = linear(width, inner), linear(inner, width), linear(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A layer of Llama's."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.before, self.between = Norm(width), Norm(width)
        self.attention, self.feed_forward = Attention(width, heads, groups), FeedForward(width, inner)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), turns)
        return x + self.feed_forward(self.between(x))


def turned(t: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings as torchtitan computes them: pairs as complex numbers of single precision."""
    pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(t)


def repeated(t: torch.Tensor, times: int) -> torch.Tensor:
    """Keys or values, once for each head that reads them."""
    batch, length, groups, size = t.shape
    return t[:, :, :, None].expand(batch, length, groups, times, size).reshape(batch, length, groups * times, size)


class Language(nn.Module):
    """A model of Llama's shape with its loss, in bfloat16."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, vocabulary: int = 128256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, 8, inner) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        return self.loss(self.head(self.norm(x)), labels)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy in single precision, as torchtitan computes it."""
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


SIZES = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248)}


def absent(
    size: str, batch: int, length: int, layers: int | None = None, kind: type[Language] = Language
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and its arguments on `meta`."""
    most, width, heads, inner = SIZES[size]
    with torch.device("meta"):
        model = kind(layers or most, width, heads, inner).to(torch.bfloat16)
        tokens = torch.zeros(batch, length, dtype=torch.long)
        turns = torch.zeros(length, 1, width // heads // 2, dtype=torch.complex64)
    return model, (tokens, tokens, turns)


def large() -> Section:
    """Seconds and memory of plans, each in a process of its own."""
    notes = (
        "A plan with six choices for one H100, 4,096 tokens, AdamW, from the model on `meta` to the text; each in a process "
        "of its own, after the imports."
    )
    section = Section("What plan takes: large models on meta", notes, ["model", "layers", "choices", "CPU s", "GB"])
    for size, layers in (("70B", 20), ("70B", 40), ("70B", 80), ("405B", 126)):
        command = [sys.executable, "-m", "benchmarks.plan", "one", size, str(layers)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        section.add(said[-5:], seconds=float(said[-2]), gigabytes=float(said[-1]))
    return section


def one(size: str, layers: int) -> None:
    """One plan, timed from the model on `meta` to the text."""
    start = time.process_time()
    model, inputs = absent(size, 1, 4096, layers)
    found = foregrad.plan(model, *inputs, optimizer=torch.optim.AdamW, device="h100")
    str(found)
    took, used = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{size:8}{layers:8}{len(found.choices):9}{took:8.1f}{used:7.2f}")


# --------------------------------------------------------------------------------------------------------- published runs
# benchmarks/llama3_h100_202412_torchtitan.md in pytorch/torchtitan: FSDP in bfloat16 over shards, gradients and an AdamW
# state in single precision; reductions in single precision; selective checkpointing saves attention and every second
# product of a layer, besides what enters it. The compiled runs fuse, which is no matter of the plan.


def selective(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Policy:
    """torchtitan's selective checkpointing."""
    joint = step_of(model, inputs, {}, is_accelerator=True).joint
    work = work_of(joint, DEVICES["h100"])
    layer = functools.partial(layer_of, work, layers_of(work.values()))
    borders = borders_of(joint, layer)
    counts: dict[str, int] = {}
    answers: dict[str, str | None] = {}

    def answer(candidate: Any) -> str | None:
        name = candidate.node.name
        if name not in answers:
            answers[name] = choose(candidate)
        return answers[name]

    def choose(candidate: Any) -> str | None:
        path = layer(candidate.node.name)
        if not path:
            return None
        if candidate.node.name in borders or "attention" in str(candidate.op):
            return "save"
        if candidate.op is torch.ops.aten.mm.default:
            counts[path] = counts.get(path, 0) + 1
            return "save" if counts[path] % 2 else "recompute"
        return "recompute"

    return Policy(answer)


_SAVED = {
    "mm.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_efficient_attention.default",
}


def selective_contexts() -> Any:
    """torchtitan's selective checkpointing, as it says it to PyTorch."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    counts: dict[bool, int] = {}

    def choose(context: Any, func: Any, *_: Any, **__: Any) -> Any:
        is_product = func is torch.ops.aten.mm.default
        counts[context.is_recompute] = counts.get(context.is_recompute, 0) + is_product
        every_second = is_product and counts[context.is_recompute] % 2 == 0
        saved = str(func).removeprefix("aten.") in _SAVED and not every_second
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class Checkpointed(Language):
    """The model as torchtitan trains it: each layer under PyTorch's checkpointing."""

    settings: ClassVar[dict[str, Any]] = {}

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, turns, use_reentrant=False, preserve_rng_state=False, **self.settings)
        return self.loss(self.head(self.norm(x)), labels)


class Selective(Checkpointed):
    """The same, by selective checkpointing."""

    settings: ClassVar[dict[str, Any]] = {"context_fn": selective_contexts}


PUBLISHED = {("8B", 8): {"eager": 82.4, "compiled": 77.0}, ("8B", 128): {"eager": 67.0, "compiled": 62.0}}

_PUBLISHED = (
    "GiB of a rank, beside benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan: Llama 3.1, 8,192 tokens; 8B by "
    "FSDP, local batch 2, selective checkpointing; 70B by FSDP 32 and TP 8 (sequence parallel, loss parallel), local batch 16, "
    "full checkpointing. The published figures are the most that the allocator has *reserved*; torchtitan's script for one host "
    "(8 ranks) sets expandable segments, its script for many does not, so that both are here. Nothing is fitted: the "
    "allocations of a choice of `foregrad.plan` are replayed by the allocator's rules (`plan.reserved`). The choice for eager "
    "runs is `eager`, of the model with PyTorch's own checkpointing: Python and autograd hold values longer there. Compiled "
    "layers let values go after their last reader, as foregrad's halves do: a policy that saves the same values. The compiled "
    "runs are eager outside of their layers: of 70B, in the loss, which makes the peak, so that `eager` is the choice. Float8 "
    "(70B) is in neither."
)


def published() -> Section:
    """The table beside published runs: reserved in foregrad's order, and in eager's."""
    columns = ["model, ranks", "run", "choice", "allocated", "reserved", "expandable", "by stream", "published", "off"]
    columns.append("off, expandable")
    section = Section("What plan foresees: published runs of torchtitan", _PUBLISHED, columns)
    for ranks in (8, 128):
        model, inputs = absent("8B", 2, 8192)
        settings = {"mesh": {"fsdp": ranks, "master_dtype": "float32", "reduce_dtype": "float32"}}
        found = {
            "selective": reserved_both("selective", model, inputs, {"selective": selective(model, inputs)}, **settings)
        }
        found["eager"] = reserved_both("eager", absent("8B", 2, 8192, kind=Selective)[0], inputs, {}, **settings)
        for run, theirs in PUBLISHED["8B", ranks].items():
            _published_rows(section, (f"8B, {ranks}", run), found, theirs)
    _published_rows(section, ("70B, 32 by 8", "compiled, float8"), split_70b(), 71.9)
    return section


def reserved_both(choice: str, model: nn.Module, inputs: Any, policies: dict[str, Any], **settings: Any) -> list[Any]:
    """Of a plan's choice, under the allocator's default, and under expandable segments."""
    settings |= {"optimizer": torch.optim.AdamW, "device": "h100", "policies": policies}
    plan = foregrad.plan(model, *inputs, **settings)
    return [plan.reserved(choice, expandable=expandable) for expandable in (False, True)]


def _published_rows(section: Section, title: tuple[str, str], found: dict[str, list[Any]], theirs: float) -> None:
    for choice, both in found.items():
        ours = [one.reserved / GIB for one in both]
        streams = " + ".join(f"{count / GIB:.1f}" for count in both[0].by_stream.values())
        cells = [*title, choice, f"{both[0].allocated / GIB:.1f}", *(f"{one:.1f}" for one in ours)]
        cells += [streams, f"{theirs:.1f}", *(f"{one / theirs - 1:+.1%}" for one in ours)]
        section.add(cells, ours=ours, theirs=theirs)
        print("    ", *cells, flush=True)


def split_70b(layers: int = 80) -> dict[str, list[Any]]:
    """What is reserved for a rank of 256: its parts of the operators by DTensor, and its shards of these."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    found = {}
    with foregrad.planning.fake_ranks(256, 0):
        mesh = init_device_mesh("cpu", (32, 8), mesh_dim_names=("fsdp", "tp"))
        ranks = {"fsdp": 32, "tp": 8, "master_dtype": "float32", "reduce_dtype": "float32"}
        for choice, kind in (("checkpoint each layer", Language), ("eager", Checkpointed)):
            model, inputs = absent("70B", 16, 8192, layers, kind)
            split(model, mesh["tp"])
            with loss_parallel():
                found[choice] = reserved_both(choice, model, inputs, {}, mesh=ranks)
    return found


def split(model: nn.Module, mesh: Any) -> None:
    """Tensor, sequence and loss parallel as torchtitan has them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as by

    columns, rows = by.ColwiseParallel, functools.partial(by.RowwiseParallel, output_layouts=Shard(1))
    ends = {
        "embedding": rows(input_layouts=Replicate()),
        "norm": by.SequenceParallel(),
        "head": columns(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    whole = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    alone = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    by.parallelize_module(model, mesh, ends)
    for layer in model.layers:
        within = {"before": by.SequenceParallel(), "between": by.SequenceParallel()}
        within |= {"attention": by.PrepareModuleInput(**whole), "feed_forward": by.PrepareModuleInput(**alone)}
        within |= {f"attention.{name}": columns() for name in ("wq", "wk", "wv")} | {"attention.wo": rows()}
        within |= {f"feed_forward.{name}": columns() for name in ("w1", "w3")} | {"feed_forward.w2": rows()}
        by.parallelize_module(layer, mesh, within)


# --------------------------------------------------------------------------------------------------------- largest


def largest() -> Section:
    """The largest batch by symbols, beside the largest by trying."""
    notes = (
        "The largest batch that fits when everything is saved: by `plan.largest`, from a capture with a symbol for the batch "
        "and one of a batch of one; and by a capture of every batch up to it. Sizes: how many the plan was asked for."
    )
    columns = ["model", "layers", "tokens", "under", "largest", "by trying", "captures", "sizes", "CPU s"]
    section = Section("What plan finds: the largest batch", notes, columns)
    cases = (("8B", 2048, 4, "40 GiB"), ("8B", 4096, 2, "30 GiB"), ("70B", 1024, 2, "70 GiB"))
    for size, length, layers, under in cases:
        model, inputs = absent(size, 2, length, layers)
        plan = foregrad.plan(model, *inputs, optimizer="SGD", device="h100")
        start = time.process_time()
        found = plan.largest(batch=(0, 0, 1), under=under, choice="save all")
        took = time.process_time() - start
        tried = max(b for b in range(1, found.size + 3) if _peak(absent(size, b, length, layers)) <= found.under)
        cells = [size, layers, length, under, found.size, tried, found.captures, len(found.tried), f"{took:.1f}"]
        section.add(list(map(str, cells)), found=found.size, tried=tried)
    return section


def _peak(built: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> int:
    found = foregrad.plan(built[0], *built[1], optimizer="SGD", device="h100").choice("save all").peak
    assert found is not None
    return found


PARTS = {"peaks": peaks, "large": large, "published": published, "largest": largest}


def main() -> None:
    """Run what is asked for."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--out", type=Path, help="a folder whose RESULTS.md and RESULTS.json are to have the tables")
    options = parser.parse_args()
    if options.parts[0] == "one":
        one(options.parts[1], int(options.parts[2]))
        return
    sections = [PARTS[part]() for part in options.parts]
    if options.out is not None:
        write_results(sections, options.out)


if __name__ == "__main__":
    main()
