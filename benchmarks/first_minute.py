"""The first result of a small model in a fresh process: eager, foregrad on eager's kernels, and with the default backend.

    python -m benchmarks.first_minute [--rounds 3]

CPU seconds of the process and of the compilers that it starts, from `import foregrad` to the end of the first backward;
PyTorch's import comes before. Cold: Inductor's and foregrad's caches are empty. Warm: as the cold start left them.
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
import resource, sys
import torch
def spent():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
x = torch.randn(4, 8)
start = spent()
if sys.argv[1] != "eager":
    import foregrad
    model = foregrad.compile(model, **({} if sys.argv[1] == "default" else {"backend": "eager"}))
loss = model(x).square().mean()
loss.backward()
print(spent() - start, loss.item())
"""

_WAYS = {"eager": "eager PyTorch", "kernels": '`backend="eager"`', "default": "the default backend"}


def collect(rounds: int) -> Section:
    """The table."""
    section = Section(
        "First result of a small model",
        "A perceptron of 280 weights: CPU seconds to the end of the first backward in a fresh process, compilers that it "
        "starts included, PyTorch's import apart; least of the rounds. "
        'Wanted: the default backend at most 1.3 times `backend="eager"`.',
        ["", "cold", "warm", "loss"],
    )
    for way, title in _WAYS.items():
        cold, warm = [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                for seconds in (cold, warm):
                    took, loss = _run(way, folder)
                    seconds.append(took)
        section.add(
            [title, f"{min(cold):.2f}", f"{min(warm):.2f}", f"{loss:.7f}"],
            way=way,
            cold=statistics.median(cold),
            warm=statistics.median(warm),
        )
    return section


def _run(way: str, folder: str) -> tuple[float, float]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "FOREGRAD_CACHE_DIR": f"{folder}/foregrad"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, way], capture_output=True, text=True, check=True, env={**os.environ, **caches}
    )
    took, loss = map(float, done.stdout.split())
    return took, loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    collect(parser.parse_args().rounds)
