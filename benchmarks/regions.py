"""Regions compiled once: `foregrad.compile(..., regions=)` with and without, and `torch.compile`, all with Inductor.

    python -m benchmarks.regions [gpt2-12 gpt2-24 gpt2-48 llama-12 bert-12 resnet-50] [--no-steps] [--write]
    python -m benchmarks.regions gpt-12 --device cuda     # 768 wide, 8 texts of 1024 tokens
    python -m benchmarks.regions --threads 2 --write      # steps alone

Models of the library transformers, 128 wide, random weights, without dropout (each way draws numbers of its own);
ResNet-50 is whole; `gpt-12` needs no transformers. `compile`, `step` and `peak` as in benchmarks/inductor.py: each
compilation in a process of its own, with empty caches, the ways in turn; steps of all ways in one process, in turns.
With several threads seconds are those of the wall clock; on a GPU too, where kernels compile in parallel and products
are in TF32.
"""

# ruff: noqa: ANN001, ANN002, ANN201
from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import Section, write_results
from benchmarks.inductor import GPT2, MODELS, of_transformers, prepare, seconds, step, steps_and_peaks

WAYS = ("torch.compile", "regions=False", "regions='auto'", "auto behind Dynamo", "regions=True")
DEFAULT = ["gpt2-12", "gpt2-24", "gpt2-48", "llama-12", "bert-12", "resnet-50"]


def built(name, device):
    torch.manual_seed(0)
    if name.startswith("gpt-"):
        small = device == "cpu"
        layers, width, length = int(name[4:]), 128 if small else 768, 64 if small else 1024
        model = GPT2(layers, width, width // 64, 512 if small else 8192, length)
        inputs = (torch.randint(0, 512, (2 if small else 8, length)),)
    else:
        model, inputs = MODELS[name]() if name in MODELS else of_transformers(name)
    return model.to(device), tuple(value.to(device) for value in inputs)


def compiled(way, model):
    if way == "torch.compile":
        return torch.compile(model, backend="inductor")
    import foregrad

    if way == "auto behind Dynamo":
        return torch.compile(model, backend="foregrad", options={"backend": "inductor", "regions": "auto"})
    settings = {"regions=False": False, "regions=True": True, "regions='auto'": "auto"}
    return foregrad.compile(model, backend="inductor", regions=settings[way])


def compile_once(name, device, threads, way):
    """In a child: seconds to the end of the first backward."""
    import foregrad

    prepare(device, int(threads))
    foregrad.config.cache = False
    model, inputs = built(name, device)
    started = seconds(device)
    loss = step(model, compiled(way, model), inputs)
    return {"seconds": seconds(device) - started, "loss": loss.item()}


def run_steps(name, device, threads, rounds, *ways):
    """In a child: milliseconds of a step for each way, and peaks."""
    import foregrad

    prepare(device, int(threads))
    foregrad.config.cache = False
    model, inputs = built(name, device)
    calls, losses = {}, {}
    for way in ways:
        torch._dynamo.reset()
        calls[way] = compiled(way, model)
        losses[way] = step(model, calls[way], inputs).item()
    tolerance = 1e-5 if device == "cpu" else 1e-2
    assert max(losses.values()) - min(losses.values()) < tolerance * max(1, abs(losses[ways[0]])), losses
    return steps_and_peaks(model, calls, inputs, int(rounds), device)


def in_child(kind, *arguments, cache):
    threads = str(arguments[2])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": os.path.join(cache, "triton")}
    environment |= {"OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if "cpu" in arguments:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    command = [sys.executable, "-m", "benchmarks.regions", "--child", kind, *map(str, arguments)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    if out.returncode:
        raise SystemExit(out.stderr)
    print(kind, *arguments, out.stdout.strip().splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(out.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--ways", nargs="*")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compiles", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-steps", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        print(json.dumps((compile_once if kind == "compile" else run_steps)(*rest)))
        return
    if arguments.threads > 1:
        arguments.compiles = 0
    section = section_of(arguments)
    stored = Path(__file__).parent / "RESULTS.json"
    if arguments.write and stored.exists():
        stored_rows = json.loads(stored.read_text()).get(section.title, {"rows": [], "data": []})
        for row, data in zip(stored_rows["rows"], stored_rows["data"], strict=True):
            if data["model"] not in arguments.models:  # a model takes minutes
                section.add(row, **data)
    for name in arguments.models:
        compare(name, arguments, section)
        if arguments.write:
            write_results([section], Path(__file__).parent)


def section_of(arguments):
    title, compile = "Regions compiled once", "to the end of the first backward with cold caches"
    if arguments.device != "cpu":
        title += ", on a GPU"
        text = f"Seconds of the wall clock {compile}; milliseconds of a step, all kernels done;"
    elif arguments.threads > 1:
        title += f", {arguments.threads} threads"
        text = "Milliseconds of a step, by the wall clock;"
    else:
        text = f"CPU seconds {compile}, C++ compiler included; CPU milliseconds of a step, one thread;"
    text += " MB over the start of a step. In brackets the ratio to torch.compile's."
    return Section(title, text, ["model", "way", "compile, s", "step, ms", "peak, MB"])


def compare(name, arguments, section):
    device, threads = arguments.device, arguments.threads
    ways = arguments.ways or WAYS[: 4 if device == "cpu" else 3]
    spent = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(arguments.compiles):
            for way in ways:
                with tempfile.TemporaryDirectory() as empty:
                    spent[way].append(in_child("compile", name, device, threads, way, cache=empty)["seconds"])
                    shutil.copytree(empty, cache, dirs_exist_ok=True)
        if arguments.no_steps:
            measured = {"step": dict.fromkeys(ways, 0.0), "peak": dict.fromkeys(ways, 0)}
        else:
            measured = in_child("steps", name, device, threads, arguments.rounds, *ways, cache=cache)
    for way in ways:
        seconds_of = {way: statistics.median(found or [0.0]) for way, found in spent.items()}
        values = [seconds_of[way], measured["step"][way], measured["peak"][way] / 1e6]
        base = [seconds_of[ways[0]], measured["step"][ways[0]], measured["peak"][ways[0]] / 1e6]
        cells = [
            f"{value:.2f} ({value / of:.2f}x)" if value and of else "" for value, of in zip(values, base, strict=True)
        ]
        section.add([name, way, *cells], model=name, way=way, compile_s=values[0], step_ms=values[1], peak_mb=values[2])


if __name__ == "__main__":
    main()
