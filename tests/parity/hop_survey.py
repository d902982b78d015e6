"""PyTorch's samples of higher-order operators, compiled: `python -m tests.parity.hop_survey` prints a row for each.

Each is equal to eager's (results and gradients), or refused by name; each runs in a process of its own, which is to end
as it should. Through both doors: `foregrad.compile`, and `torch.compile(backend="foregrad")`.
"""

import subprocess
import sys
import warnings

import torch
from torch.testing._internal.hop_db import hop_db
from torch.utils._pytree import tree_leaves, tree_map_only

import foregrad

DOORS = {
    "direct": lambda f: foregrad.compile(f, backend="eager", on_unsupported="raise"),
    "dynamo": lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager", "on_unsupported": "raise"}),
}


def outcome(f, sample):
    """Results and gradients of one call."""
    torch.manual_seed(0)
    args = sample.args if sample.input is None else (sample.input, *sample.args)
    args, kwargs = tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (tuple(args), sample.kwargs)
    )
    results = [r for r in tree_leaves(f(*args, **kwargs)) if isinstance(r, torch.Tensor)]
    losses = [r.sum() for r in results if r.requires_grad]
    if losses:
        sum(losses).backward()
    return [r.detach() for r in results] + [a.grad for a in tree_leaves(args) if isinstance(a, torch.Tensor)]


def same(expected, found):
    pairs = zip(expected, found, strict=True)
    return all(a is b is None or (None not in (a, b) and torch.allclose(a, b)) for a, b in pairs)


def verdict(f, sample, door):
    torch._dynamo.reset()
    try:
        expected = outcome(f, sample)
    except Exception as error:
        return f"eager raises {type(error).__name__}"
    try:
        return "equal" if same(expected, outcome(DOORS[door](f), sample)) else "WRONG"
    except Exception as error:
        text = next((line for line in str(error).splitlines() if "UnsupportedOpError" in line), str(error))
        return f"{type(error).__name__}: {text.splitlines()[0][:90]}"


def row(index):
    warnings.simplefilter("ignore")
    entry = hop_db[index]
    sample = next(iter(entry.sample_inputs("cpu", torch.float32, requires_grad=True)))
    return " | ".join(verdict(entry.op, sample, door) for door in DOORS)


def main():
    if len(sys.argv) > 1:
        print(row(int(sys.argv[1])))
        return
    print("operator |", " | ".join(DOORS))
    for index, entry in enumerate(hop_db):
        command = [sys.executable, "-m", "tests.parity.hop_survey", str(index)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        lines = run.stdout.strip().splitlines()
        said = lines[-1] if run.returncode == 0 and lines else f"CRASH, exit status {run.returncode}"
        print(f"{entry.name} {entry.variant_test_name} | {said}", flush=True)


if __name__ == "__main__":
    main()
