"""The first result of a small model in a fresh process: eager, foregrad on eager's kernels, and with the default backend.

    python -m benchmarks.first_minute [--rounds 3]

CPU seconds of the process and of the compilers that it starts, from `import foregrad` to the end of the first backward;
PyTorch's import comes before. Cold: Inductor's and foregrad's caches are empty. Warm: as the cold start left them, after
Inductor's kernels took over. A second table has the time until then, and the CPU seconds of the process that compiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.common import Section

__all__ = ["collect"]

_SCRIPT = """
import resource, sys, time
import torch
def spent(*who):
    return sum(sum(resource.getrusage(one)[:2]) for one in who)
ALL = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
x = torch.randn(4, 8)
start, began = spent(*ALL), time.perf_counter()
if sys.argv[1] != "eager":
    import foregrad
    how = {"default": {}, "changed": {}, "kernels": {"backend": "eager"}, "inductor": {"backend": "inductor"}}
    model = foregrad.compile(model, **how[sys.argv[1]])
def step():
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()
loss, own = step(), spent(*ALL) - start
other = took = 0.0
if sys.argv[1] == "changed":
    while model.foregrad.specializations[0].successor is not None:
        time.sleep(0.02)
        loss = step()
    own, took = spent(*ALL) - start, time.perf_counter() - began
    before = spent(resource.RUSAGE_CHILDREN)
    from foregrad.later.worker import WORKER
    WORKER.stop()
    other = spent(resource.RUSAGE_CHILDREN) - before
print(own, loss, took, other)
"""

_WAYS = {
    "eager": "eager PyTorch",
    "kernels": '`backend="eager"`',
    "default": "the default backend",
    "inductor": '`backend="inductor"`',
}
Times = tuple[float, float, float, float]


def collect(rounds: int) -> list[Section]:
    """The tables."""
    first = Section(
        "First result of a small model",
        "A perceptron of 280 weights: CPU seconds to the end of the first backward in a fresh process, compilers that it "
        "starts included, PyTorch's import apart; least of the rounds. "
        'Wanted: the default backend at most 1.3 times `backend="eager"`.',
        ["", "cold", "warm", "loss"],
    )
    changed = Section(
        "Until Inductor's kernels take over",
        "The same model and the default backend, a step every 20 ms: seconds until Inductor's kernels run, CPU seconds of "
        "the process, and of the process that compiles; least of the rounds.",
        ["", "seconds", "CPU here", "CPU there", "loss"],
    )
    cold: dict[str, list[Times]] = {}
    warm: dict[str, list[Times]] = {}
    for _ in range(rounds):
        for way in _WAYS:
            with tempfile.TemporaryDirectory() as folder:
                cold.setdefault(way, []).append(_run(way, folder))
                if way == "default":
                    cold.setdefault("changed", []).append(_run("changed", folder))
                    warm.setdefault("changed", []).append(_run("changed", folder))
                warm.setdefault(way, []).append(_run(way, folder))
    for way, title in _WAYS.items():
        times = [[run[0] for run in runs[way]] for runs in (cold, warm)]
        cells = [f"{min(seconds):.2f}" for seconds in times]
        middle = dict(zip(("cold", "warm"), map(statistics.median, times), strict=True))
        first.add([title, *cells, f"{cold[way][0][1]:.7f}"], way=way, **middle)
    for title, runs in (("cold", cold["changed"]), ("warm", warm["changed"])):
        own, loss, took, other = map(min, zip(*runs, strict=True))
        cells = [f"{value:.2f}" for value in (took, own, other)]
        changed.add([title, *cells, f"{loss:.7f}"], start=title, seconds=took, own=own, other=other)
    return [first, changed]


def _run(way: str, folder: str) -> Times:
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "FOREGRAD_CACHE_DIR": f"{folder}/foregrad"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, way], capture_output=True, text=True, check=True, env={**os.environ, **caches}
    )
    own, loss, took, other = map(float, done.stdout.split())
    return own, loss, took, other


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    collect(parser.parse_args().rounds)
