"""Regions compiled once: `foregrad.compile(..., regions=)` with and without, and `torch.compile`, all with Inductor.

    python -m benchmarks.regions [gpt2-12 gpt2-24 llama-12 bert-12 resnet-50] [--rounds 30] [--no-steps] [--write]

Models of the library transformers, 128 wide, random weights, without dropout (each way draws numbers of its own);
ResNet-50 is whole. `compile`, `step` and `peak` as in benchmarks/inductor.py: each compilation in a process of its own,
with empty caches, the ways in turn; steps of all ways in one process, in turns.
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
from benchmarks.inductor import MODELS, cpu_seconds, of_transformers, prepare, step, steps_and_peaks

WAYS = ("torch.compile", "regions=False", "regions=True", "regions='auto'")
DEFAULT = ["gpt2-12", "gpt2-24", "llama-12", "bert-12", "resnet-50"]


def built(name):
    torch.manual_seed(0)
    return MODELS[name]() if name in MODELS else of_transformers(name)


def compiled(way, model):
    if way == "torch.compile":
        return torch.compile(model, backend="inductor")
    import foregrad

    settings = {"regions=False": False, "regions=True": True, "regions='auto'": "auto"}
    return foregrad.compile(model, backend="inductor", regions=settings[way])


def compile_once(name, way):
    """In a child: CPU seconds to the end of the first backward."""
    prepare()
    model, inputs = built(name)
    if way != "torch.compile":
        import foregrad

        foregrad.config.cache = False
    started = cpu_seconds()
    loss = step(model, compiled(way, model), inputs)
    return {"cpu": cpu_seconds() - started, "loss": loss.item()}


def run_steps(name, ways, rounds):
    """In a child: milliseconds of a step for each way, and peaks."""
    import foregrad

    prepare()
    foregrad.config.cache = False
    model, inputs = built(name)
    calls, losses = {}, {}
    for way in ways:
        torch._dynamo.reset()
        calls[way] = compiled(way, model)
        losses[way] = step(model, calls[way], inputs).item()
    assert max(losses.values()) - min(losses.values()) < 1e-5 * max(1, abs(losses[ways[0]])), losses
    return steps_and_peaks(model, calls, inputs, rounds)


def in_child(*arguments, cache):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "benchmarks.regions", "--child", *map(str, arguments)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    if out.returncode:
        raise SystemExit(out.stderr)
    print(*arguments, out.stdout.strip().splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(out.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--ways", nargs="*", default=list(WAYS[:3]))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compiles", type=int, default=1)
    parser.add_argument("--no-steps", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, name, detail, *more = arguments.child
        found = compile_once(name, detail) if kind == "compile" else run_steps(name, more, int(detail))
        print(json.dumps(found))
        return
    section = Section(
        "Regions compiled once",
        "CPU seconds to the end of the first backward with cold caches, C++ compiler included; CPU milliseconds of a "
        "step, one thread; MB over the start of a step. In brackets the ratio to torch.compile's.",
        ["model", "way", "compile, s", "step, ms", "peak, MB"],
    )
    for name in arguments.models:
        compare(name, arguments, section)
    if arguments.write:
        write_results([section], Path(__file__).parent)


def compare(name, arguments, section):
    ways = arguments.ways
    spent = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(arguments.compiles):
            for way in ways:
                with tempfile.TemporaryDirectory() as empty:
                    spent[way].append(in_child("compile", name, way, cache=empty)["cpu"])
                    shutil.copytree(empty, cache, dirs_exist_ok=True)
        if arguments.no_steps:
            measured = {"step": dict.fromkeys(ways, 0.0), "peak": dict.fromkeys(ways, 0)}
        else:
            measured = in_child("steps", name, arguments.rounds, *ways, cache=cache)
    for way in ways:
        values = [statistics.median(spent[way]), measured["step"][way], measured["peak"][way] / 1e6]
        base = [statistics.median(spent[ways[0]]), measured["step"][ways[0]], measured["peak"][ways[0]] / 1e6]
        cells = [f"{value:.2f} ({value / of:.2f}x)" if of else "" for value, of in zip(values, base, strict=True)]
        section.add([name, way, *cells], model=name, way=way, compile_s=values[0], step_ms=values[1], peak_mb=values[2])


if __name__ == "__main__":
    main()
