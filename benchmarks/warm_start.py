"""The second process: what compiling a model costs with warm caches, beside PyTorch's.

    python -m benchmarks.warm_start [--models gpt2-12 resnet-50] [--ways pytorch ...] [--rounds 3] [--write]

Each start is a process of its own. CPU seconds of the process and of the compilers it starts, from the call to the end
of the first backward; imports of PyTorch and foregrad and the making of the model come before. Cold: all caches empty.
Warm: as the cold start left them. Cold starts once, warm ones in turns, `--rounds` times; the least and the median.

It should be: warm at most 0.2 of cold, and at most PyTorch's own warm start. Nothing may be compiled in a warm start,
which is looked at: no new file in Inductor's caches, every graph a hit.
"""

# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("pytorch", "foregrad.compile", "foregrad in torch.compile")
MODELS = ("gpt2-12", "resnet-50")


def build(name):
    from benchmarks.inductor import of_transformers, resnet50

    return resnet50() if name == "resnet-50" else of_transformers(name)


def cpu_seconds():
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def start_once(name, way):
    """In a child: what the first step costs."""
    import torch

    torch.set_num_threads(1)
    import torch._inductor.config as settings

    from benchmarks.inductor import compiled, step

    settings.compile_threads = 1  # in this process, so that its children are counted
    torch.manual_seed(0)
    model, inputs = build(name)
    if way != "pytorch":
        import foregrad  # noqa: F401
    began, wall = cpu_seconds(), time.perf_counter()
    loss = step(model, compiled(way, model), inputs)
    spent = {"cpu": cpu_seconds() - began, "wall": time.perf_counter() - wall}
    from torch._dynamo.utils import counters

    hits = {what: counters["inductor"][f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")}
    return {**spent, **hits, "loss": loss.item()}


def in_child(name, way, folder):
    paths = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *filter(None, sys.path)])
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "FOREGRAD_CACHE_DIR": os.path.join(folder, "foregrad"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "",  # foregrad's modules have bytecode as PyTorch's have, once they are installed
    }
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.warm_start", "--child", name, way],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if out.returncode:
        raise SystemExit(f"{name}, {way} failed:\n{out.stderr}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def files_in(folder):
    return {path for path in Path(folder).rglob("*") if path.suffix in (".so", ".cpp", ".py")}


def measure(name, ways, rounds):
    """For each way its cold start and its warm ones."""
    found = {}
    with tempfile.TemporaryDirectory() as parent:
        folders = {way: os.path.join(parent, str(number)) for number, way in enumerate(ways)}
        for way, folder in folders.items():
            found[way] = {"cold": in_child(name, way, folder), "warm": []}
            print(f"  {name}, {way}, cold: {found[way]['cold']}", file=sys.stderr, flush=True)
        known = {way: files_in(folder) for way, folder in folders.items()}
        for _ in range(rounds):
            for way, folder in folders.items():
                warm = in_child(name, way, folder)
                print(f"  {name}, {way}, warm: {warm}", file=sys.stderr, flush=True)
                assert warm["loss"] == found[way]["cold"]["loss"], (name, way)
                if way != "pytorch":  # which has its graphs from a cache of its own, before it asks Inductor's
                    assert warm["miss"] == 0, (name, way, "compiled something")
                assert files_in(folder) == known[way], (name, way, "compiled something")
                found[way]["warm"].append(warm)
    return found


def collect(models, ways, rounds, section):
    for name in models:
        found = measure(name, ways, rounds)
        theirs = min((warm["cpu"] for warm in found.get("pytorch", {"warm": ()})["warm"]), default=float("nan"))
        for way in ways:
            cold, warm = found[way]["cold"]["cpu"], [each["cpu"] for each in found[way]["warm"]]
            least = min(warm)
            cells = [f"{cold:.2f}", f"{least:.2f} / {statistics.median(warm):.2f}", f"{least / cold:.3f}"]
            section.add(
                [name, way, *cells, f"{least / theirs:.3f}"],
                model=name, way=way, cold_s=cold, warm_s=least, warm_over_cold=least / cold, warm_over_pytorch=least / theirs,
            )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="resnet-50, or as gpt2-12, bert-6, llama-8")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3, help="warm starts of each")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(start_once(*arguments.child)))
        return
    from benchmarks.common import Section, write_results

    section = Section(
        "A second process: warm start with Inductor inside",
        "CPU seconds, C++ compilers included, from the call to the end of the first backward, each in a process of its own. "
        "Cold: empty caches, one start. Warm: least / median of later starts, which compile nothing (checked). Should be: "
        "warm/cold at most 0.2, warm/PyTorch's warm at most 1.",
        ["model", "way", "cold", "warm", "warm/cold", "warm/PyTorch's warm"],
    )
    collect(arguments.models, arguments.ways, arguments.rounds, section)
    if arguments.write:
        write_results([section], Path(__file__).parent)


if __name__ == "__main__":
    main()
