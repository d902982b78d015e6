"""All networks through both doors, and all examples: `python -m tests.front_door.run [--jobs N] [--only TEXT]`.

Each runs in a fresh process with the default backend; takes some twenty minutes of one core when nothing is in Inductor's
cache. The tests run a few of these, and check that the list has every layer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import subprocess
import sys
import time

from .examples import ROOT, pages
from .networks import NETWORKS
from .one import DOORS

Command = tuple[str, ...]


def commands() -> list[Command]:
    """Module and arguments of each."""
    return [
        *(("one", name, door) for name in NETWORKS for door in DOORS),
        *(("examples", page, *backend) for page in pages() for backend in ((), ("default",))),
    ]


def run(command: Command, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """In a fresh process, with one thread."""
    module, *arguments = command
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", f"tests.front_door.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=timeout,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="those whose command has this text")
    options = parser.parse_args()
    chosen = [command for command in commands() if options.only in " ".join(command)]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for command, (done, seconds) in zip(chosen, pool.map(timed, chosen), strict=True):
            failed += done.returncode != 0
            said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
            print(f"{'ok' if done.returncode == 0 else 'FAILED':6s} {seconds:4.0f} s  {' '.join(command)}", flush=True)
            if done.returncode or command[0] == "one":
                print("      ", *said, flush=True)
    print(f"{len(chosen)} run, {failed} failed")
    return 1 if failed else 0


def timed(command: Command) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    done = run(command)
    return done, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
