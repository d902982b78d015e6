"""Trains every client in eager and compiled, each in a process of its own: `python -m tests.clients.run [NAME ...]`.

`--install` makes an environment that sees this one's packages and gets the clients', one by one: what can't be
installed is missing in the table, and nothing else is. It says for each client whether five steps are bitwise eager's,
with the module compiled and with the whole loss compiled, how many graphs that took, how many calls ran eagerly, and
the seconds of CPU time that the first step took beyond one in eager, beside those of PyTorch's `aot_eager`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from . import one  # noqa: F401 - fills the table of clients
from .client import CLIENTS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-clients"
HEAD = """# Clients

Libraries from the package index, with random weights: five training steps each, compared bit for bit with eager
(losses, gradients, buffers, random numbers), `backend="eager"`. `module`: the model is compiled; `loss`: a function from
a batch to its loss. `graphs/eager`: graphs made, and calls that ran eagerly, of the loss. Seconds are CPU time of the
first step, less that of one in eager. Made by `make clients`.
"""
COLUMNS = ("field", "client", "module", "loss", "graphs/eager", "seconds", "aot_eager", "its seconds")


def install() -> str:
    """The Python of the environment, with what could be installed."""
    python = str(ENVIRONMENT / "bin" / "python")
    if not ENVIRONMENT.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    (site / "foregrad_clients.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    pinned = f"torch=={torch.__version__.partition('+')[0]}"
    for package in dict.fromkeys(client.package for client in CLIENTS.values()):
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", package, pinned]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"not installed: {package}: {(done.stderr.strip().splitlines() or [''])[-1]}", flush=True)
    for package in ("torchvision", "torchaudio"):  # built for another PyTorch they fail, and whatever looks for them
        if subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False).returncode:
            subprocess.run([python, "-m", "pip", "uninstall", "-qy", package], capture_output=True, check=False)
    return python


def run(python: str, name: str, timeout: float) -> dict[str, Any] | str:
    """What a client's process says, or why it says nothing."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    try:
        done = subprocess.run(
            [python, "-m", "tests.clients.one", name],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return f"took over {timeout:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row(name: str, found: dict[str, Any] | str) -> list[str]:
    """A line of the table."""
    start = [CLIENTS[name].field, name]
    if isinstance(found, str):
        return [*start, f"missing: {found[:80]}", *[""] * (len(COLUMNS) - 3)]
    said = {form: "equal" if result["same"] else "**differs**" for form, result in found.items()}
    loss, theirs = found["function"], found["pytorch"]
    counts = f"{loss['graphs']}/{loss['eager']}" if "graphs" in loss else "-"
    times = [f"{result['seconds']:.2f}" if "seconds" in result else "-" for result in (loss, theirs)]
    return [*start, said["module"], said["function"], counts, times[0], said["pytorch"], times[1]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="clients; all without")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the packages")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--write", type=Path, help="a file for the table")
    options = parser.parse_args()
    python = install() if options.install else options.python
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    failed = 0
    for name in options.names or CLIENTS:
        found = run(python, name, options.timeout)
        lines.append("| " + " | ".join(row(name, found)) + " |")
        print(lines[-1], flush=True)
        for form, result in found.items() if isinstance(found, dict) else ():
            failed += form != "pytorch" and not result["same"]
            for said in [result["differs"], *result.get("why", ())]:
                if said:
                    print(f"    {form}: {said}", flush=True)
    if options.write is not None:
        options.write.write_text(HEAD + "\n" + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
