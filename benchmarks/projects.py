"""Compiler projects on foregrad's doors: their own tests, with their imports of AOTAutograd replaced.

    python -m benchmarks.projects autoparallel /path/to/its/checkout            # PyTorch's doors, then ours
    python -m benchmarks.projects autoparallel /path/to/its/checkout --only ours tests/test_api.py

The checkout is copied, the copy edited and run: meshes are on the CPU (`"cuda"` becomes `"cpu"`), the CPU passes for a
GPU of a known kind, as cost models ask for one, and for ours each import of AOTAutograd names a module of foregrad's.
Nothing else of the client changes. Prints how many tests pass, each that does not with its error and, by name, which
pass with PyTorch's doors alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORTS = (
    (r"torch\._functorch\._aot_autograd\.(fx_utils|descriptors)\b", "foregrad.descriptors"),
    (r"torch\._functorch\._aot_autograd\.(subclass_utils|runtime_wrappers)\b", "foregrad.joints.clients"),
    (r"torch\._functorch\.aot_autograd\b", "foregrad"),
)
ON_CPU = ((r"([\"'])cuda(:0)?\1", '"cpu"'), (r"\.cuda\(\)", ".cpu()"))
PLUGIN = '''"""The CPU passes for a GPU of a known kind."""
import torch

torch.cpu.get_device_name = lambda *_: "H100"
'''
PROJECTS = {
    "autoparallel": (("autoparallel", "tests"), "tests/test_*.py"),
    "torchtitan": (("torchtitan",), "torchtitan/experiments/graph_trainer/tests/test_*.py"),
}
RESULT = re.compile(r"^(PASSED|FAILED|ERROR) (\S+)(?: - (.*))?", re.MULTILINE)


def edited(text: str, *, ours: bool) -> str:
    for pattern, new in (*ON_CPU, *(IMPORTS if ours else ())):
        text = re.sub(pattern, new, text)
    return text


def results(checkout: Path, project: str, wanted: list[str], *, ours: bool) -> dict[str, str]:
    """By test: what became of it."""
    folders, tests = PROJECTS[project]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / project
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "assets"))
        for folder in folders:
            for path in (copy / folder).rglob("*.py"):
                path.write_text(edited(path.read_text(encoding="utf-8"), ours=ours), encoding="utf-8")
        (Path(place) / "cpu_for_gpu.py").write_text(PLUGIN, encoding="utf-8")
        paths = [place, str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        for path in wanted or sorted(str(p.relative_to(copy)) for p in copy.glob(tests)):
            command = [sys.executable, "-m", "pytest", path, "-q", "-rA", "-p", "cpu_for_gpu", "-p", "no:cacheprovider"]
            done = subprocess.run(  # one process a file: some leave a process group behind
                [*command, "--show-capture=no"], cwd=copy, env=environment, capture_output=True, text=True, check=False
            )
            for result, name, why in RESULT.findall(done.stdout):
                found[name] = result
                if result != "PASSED":
                    print(f"  {result.lower()}: {name}: {why}")
            print(f"  {path}: {sum(1 for name in found if name.startswith(path))} tests", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="*", help="files below the checkout; all by default")
    parser.add_argument("--only", choices=["pytorch", "ours"])
    wanted = parser.parse_intermixed_args()
    found: dict[str, dict[str, str]] = {}
    for door in ("pytorch", "ours"):
        if wanted.only in (None, door):
            print(f"{wanted.project}, doors: {door}")
            found[door] = results(wanted.checkout, wanted.project, wanted.tests, ours=door == "ours")
            passed = sum(result == "PASSED" for result in found[door].values())
            print(f"| {wanted.project} | {door} | {passed} of {len(found[door])} pass |")
    if len(found) == 2:
        for name, result in found["pytorch"].items():
            if result == "PASSED" and found["ours"].get(name) != "PASSED":
                print(f"  passes with PyTorch's alone: {name}")


if __name__ == "__main__":
    main()
