"""Inductor inside foregrad against `torch.compile(backend="inductor")`: compile time, time of a step, peak memory.

    python -m benchmarks.inductor [--quick] [--models gpt2 resnet mlp] [--rounds 30] [--compiles 1] [--write]

Three ways to the same kernels: PyTorch's, `torch.compile(backend="foregrad")`, and `foregrad.compile` with no Dynamo.

`--quick` is the smallest model in few rounds: some minutes in place of an hour. What runs is said on the error stream;
a model that fails, or takes longer than `--patience` for one of its runs, is named there, and the others go on.

`--write` puts the figures into RESULTS.md, beside those of other models. `transformers-...` are that library's models, 2 layers of 128.

* compile: CPU seconds of the process and of the C++ compilers that it starts, from the call to the end of the first
  backward, in a process of its own with an empty cache. A small function was compiled before, each way: what is
  imported, and the C++ header, are there.
* step: CPU milliseconds of forward and backward, one thread, all ways in turn in one process; median.
* peak: bytes over the start of a step, from the allocator's events.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202, ANN204
from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

WAYS = ("pytorch", "foregrad in torch.compile", "foregrad.compile")


# ---------------------------------------------------------------------------------------------------- models
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2's shape, cut down: 2 layers, 256 wide."""

    def __init__(self, layers=2, width=256, heads=8, vocabulary=1000, length=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.norm1(self.first(x)).relu()
        return (self.norm2(self.second(y)) + x).relu()


class ResNet(nn.Module):
    def __init__(self, channels=32, blocks=3):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(channels) for _ in range(blocks)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x).relu()).mean((2, 3))).pow(2).mean()


class MLP(nn.Module):
    def __init__(self, width=256, depth=6):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return x.pow(2).mean()


def of_transformers(name):
    """A model of benchmarks/models.py that gives its loss, and its inputs."""
    from benchmarks.models import build, first_tensor

    model, args, kwargs = build(name)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *args):
            return first_tensor(self.model(*args, **kwargs)).square().mean()

    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # each way draws numbers of its own, and the losses are compared
    return WithLoss(), args


def resnet50():
    """Full width and depth, on small images."""
    from transformers import ResNetConfig, ResNetModel

    model = ResNetModel(ResNetConfig())

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x)[0].square().mean()

    return WithLoss(), (torch.randn(8, 3, 64, 64),)


MODELS = {
    "resnet-50": resnet50,
    "transformers-gpt2": lambda: of_transformers("gpt2-2"),
    "transformers-bert": lambda: of_transformers("bert-2"),
    "gpt2": lambda: (GPT2(), (torch.randint(0, 1000, (4, 128)),)),
    "resnet": lambda: (ResNet(), (torch.randn(8, 3, 32, 32),)),
    "mlp": lambda: (MLP(), (torch.randn(512, 256),)),
}


# -------------------------------------------------------------------------------------------------- measuring
def compiled(way, model):
    if way == "pytorch":
        return torch.compile(model, backend="inductor")
    import foregrad

    if way == "foregrad.compile":
        return foregrad.compile(model, backend="inductor")
    from foregrad.dynamo import foregrad_backend

    return torch.compile(model, backend=foregrad_backend, options={"backend": "inductor"})


def step(model, call, inputs):
    loss = call(*inputs)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return loss


def seconds(device):
    """CPU seconds. Of several threads, and on a GPU with all kernels done, those of the wall clock."""
    if device == "cpu" and torch.get_num_threads() == 1:
        return cpu_seconds()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def cpu_seconds():
    """Of this process and of those that it started and waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def peak_bytes(run, device="cpu"):
    run()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def prepare(device="cpu", threads=1):
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest" if device == "cpu" else "high")
    if device == "cpu":
        import torch._inductor.config as settings

        settings.compile_threads = 1  # in this process, so that its children are counted
    import foregrad

    for compile in (torch.compile, foregrad.compile):  # what either imports is in no figure
        warm = compile(lambda x: x.sin() + 1, backend="inductor")
        warm(torch.ones(64, requires_grad=True, device=device)).sum().backward()
    torch._dynamo.reset()


def compile_once(name, way):
    """In a child: seconds to compile."""
    prepare()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    started, wall = cpu_seconds(), time.perf_counter()
    step(model, compiled(way, model), inputs)
    return {"cpu": cpu_seconds() - started, "wall": time.perf_counter() - wall}


def run_steps(name, rounds):
    """In a child: milliseconds of a step for each way and for eager, and peaks."""
    prepare()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    calls = {"eager": model}
    losses = {"eager": step(model, model, inputs).item()}
    for way in WAYS:
        torch._dynamo.reset()
        calls[way] = compiled(way, model)
        losses[way] = step(model, calls[way], inputs).item()
        assert abs(losses[way] - losses["eager"]) < 1e-5 * max(1, abs(losses["eager"])), losses
    return steps_and_peaks(model, calls, inputs, rounds)


def steps_and_peaks(model, calls, inputs, rounds, device="cpu"):
    """By way: the median milliseconds of a step, in random turns, and the peak of its memory."""
    times = {way: [] for way in calls}
    order = list(calls.items())
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # what the one before left in the caches would favour some
        for way, call in order:
            started = seconds(device)
            step(model, call, inputs)
            times[way].append(1e3 * (seconds(device) - started))
    peaks = {way: peak_bytes(lambda call=call: step(model, call, inputs), device) for way, call in calls.items()}
    return {"step": {way: statistics.median(values) for way, values in times.items()}, "peak": peaks}


class RunFailed(Exception):
    """A child process ended with an error, or did not end."""


def in_child(*arguments, cache, patience, module="benchmarks.inductor"):
    # The child imports the same foregrad, and `benchmarks`, wherever this process found them.
    paths = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *filter(None, sys.path)])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", module, "--child", *map(str, arguments)]
    started = time.perf_counter()
    print(f"{' '.join(map(str, arguments))} ...", end=" ", file=sys.stderr, flush=True)
    try:
        out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"not done after {patience:.0f} s") from None
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    if out.returncode:
        raise RunFailed(out.stderr.strip() or f"exit status {out.returncode}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model, 5 rounds, unless others are given")
    parser.add_argument("--models", nargs="*", choices=list(MODELS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--patience", type=float, default=1800, help="seconds for one run of one model")
    parser.add_argument("--compiles", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, name, detail = arguments.child
        print(json.dumps(compile_once(name, detail) if kind == "compile" else run_steps(name, int(detail))))
        return
    from benchmarks.common import Section, write_results

    if arguments.rounds is None:
        arguments.rounds = 5 if arguments.quick else 30
    failed = []
    for name in arguments.models or (["mlp"] if arguments.quick else list(MODELS)):
        section = Section(
            "Inductor inside foregrad against torch.compile(backend='inductor')",
            "Compile: CPU seconds to the end of the first backward, C++ compiler included, cold caches. Step: CPU "
            "milliseconds of forward and backward, median of turns, one thread. Peak: MB over the start of a step. In "
            "brackets the ratio to PyTorch's.",
            ["model", "way", "compile, s", "step, ms", "peak, MB"],
        )
        try:
            compare(name, arguments, section)
        except RunFailed as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        if arguments.write:  # model by model, as one takes minutes
            keep_others(section, Path(__file__).parent / "RESULTS.json")
            write_results([section], Path(__file__).parent)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def keep_others(section, path):
    """The figures of models that were not run now: a model takes minutes."""
    stored = json.loads(path.read_text()).get(section.title, {"rows": [], "data": []})
    measured = {data["model"] for data in section.data}
    others = [pair for pair in zip(stored["rows"], stored["data"], strict=True) if pair[1]["model"] not in measured]
    section.rows[:0] = [row for row, _ in others]
    section.data[:0] = [data for _, data in others]


def compare(name, arguments, section):
    spent, patience = {way: [] for way in WAYS}, arguments.patience
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(arguments.compiles):
            for way in WAYS:
                with tempfile.TemporaryDirectory() as empty:
                    spent[way].append(in_child("compile", name, way, cache=empty, patience=patience)["cpu"])
                    shutil.copytree(empty, cache, dirs_exist_ok=True)  # what is timed next needs compiling no more
        measured = in_child("steps", name, arguments.rounds, cache=cache, patience=patience)
    base = (statistics.median(spent["pytorch"]), measured["step"]["pytorch"], measured["peak"]["pytorch"])
    for way in ("eager", *WAYS):
        seconds = statistics.median(spent[way]) if way in spent else None
        values = (seconds, measured["step"][way], measured["peak"][way])
        cells = []
        for value, reference, unit in zip(values, base, (1, 1, 1e6), strict=True):
            cells.append("" if value is None else f"{value / unit:.2f} ({value / reference:.2f}x)")
        section.add(
            [name, way, *cells], model=name, way=way, compile_s=seconds, step_ms=values[1], peak_bytes=values[2]
        )


if __name__ == "__main__":
    main()
