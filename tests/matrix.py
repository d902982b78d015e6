"""The tests on each Python that is here, or with each PyTorch: `make matrix`, or `python tests/matrix.py --help`.

Each Python gets a virtual environment of its own with the pinned PyTorch, `.venv-3.13` and so on, and each PyTorch one
with the Python that runs this, `.venv-torch-2.15.0`: made by `make setup` and kept for the next time. Runs on any
Python, without packages.
"""

from __future__ import annotations

import argparse
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
TRIED = ("3.14",)  # counts as missing where PyTorch does not install
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
# With one PyTorch, tests can differ between two Pythons where foregrad asks CPython rather than PyTorch. `--of-python` runs
# the files about one of these questions; `make matrix` runs all tests.
OF_PYTHON = {
    "its C API, and objects' layout": "native",
    "tables of attributes and items, cells, classes, and their versions": """guards/test_arguments_added_to.py
        guards/test_attribute_tables.py guards/test_changes.py guards/test_keys.py guards/test_looks_that_make_objects.py
        guards/test_methods_put_later.py guards/test_names_made_up.py guards/test_places_of_tensors.py
        guards/test_reads_by_other_ways.py guards/test_replaced_classes.py guards/test_special_places.py
        python/test_objects.py python/test_state_read.py""",
    "frames and bytecode": """guards/test_code_that_ran.py python/test_code_around_the_call.py python/test_numbers_that_raise.py
        python/test_sums.py unit/test_code_names.py unit/test_origin.py unit/test_texts.py""",
    "functions in C": """python/test_cached_functions.py python/test_identity_functions.py
        python/test_names_that_captures_bind.py python/test_program_output.py world/test_closed_world.py""",
    "generators and iterators": "guards/test_generators.py python/test_iterators.py",
    "lifetimes, the collector, threads and signals": """guards/test_calls_that_raise.py guards/test_handlers_of_signals.py
        guards/test_identity.py guards/test_interrupts.py guards/test_life.py guards/test_threads.py
        python/test_other_threads.py unit/test_backends_lifetimes.py unit/test_capture_lets_go.py unit/test_collection.py
        unit/test_identity.py unit/test_left_behind.py unit/test_patches.py""",
    "code that foregrad writes": """golden guards/test_hostile_names.py unit/test_backends_boxed.py unit/test_backends_eager.py
        unit/test_backends_parts.py unit/test_backends_source.py unit/test_spelling.py""",
    "packages": "unit/test_import.py unit/test_packaging.py",
}
ASK = "import sys, venv, ensurepip; print('%d.%d.%d' % sys.version_info[:3], getattr(sys, '_is_gil_enabled', bool)() or sys.version_info < (3, 13))"
NUMBERS = re.compile(r"\d+")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other arguments are pytest's.")
    parser.add_argument("--only", nargs="*", metavar="X.Y", default=[], help="these versions of Python")
    parser.add_argument(
        "--second-to", metavar="PYTHON", help="only the newest that is of another version than this one"
    )
    parser.add_argument(
        "--environment", action="append", metavar="X.Y=FOLDER", default=[], help="run in this one as it is"
    )
    parser.add_argument(
        "--torch", nargs="*", metavar="X.Y.Z", help=f"these versions of PyTorch (without one: {', '.join(TORCHES)})"
    )
    parser.add_argument("--setup-only", action="store_true", help="make the environments, and run nothing")
    parser.add_argument("--setup-limit", type=float, metavar="SECONDS", help="give up making an environment after this")
    parser.add_argument("--of-python", action="store_true", help="run the tests that can differ between Pythons")
    settings, rest = parser.parse_known_args()
    pytest_arguments = [argument for argument in rest if argument != "--"]
    if settings.of_python:
        pytest_arguments += [f"tests/{path}" for paths in OF_PYTHON.values() for path in paths.split()]
    given = dict(item.split("=", 1) for item in settings.environment)
    pythons = find_pythons(settings.only or [*SUPPORTED, *TRIED], given)
    if settings.second_to:
        pythons = second_to(version_of(settings.second_to), pythons)
        if not pythons:
            print("==> no second Python is here: nothing more to test")
            return 0
    runs = [(version, python, given.get(version), "") for version, python in pythons.items()]
    if settings.torch is not None:
        here = ".".join(map(str, sys.version_info[:2]))
        runs = [(here, sys.executable, None, torch) for torch in settings.torch or TORCHES]
    if settings.setup_only:
        for version, python, folder, torch in runs:
            set_up(environment_of(version, folder, torch), python, torch, settings.setup_limit)
        return 0
    rows = []
    for run in runs:
        rows.append(run_one(*run, settings.setup_limit, pytest_arguments))
        print_table(rows)
    if not rows:
        print("none of these Pythons is here: see MATRIX_PYTHONS")
    return int(not rows or any(row["failed"] for row in rows))


# ---------------------------------------------------------------------------------------------------- interpreters


def version_of(python: str) -> str | None:
    """The full version of an interpreter, with the GIL and able to make environments; None, and a word, otherwise."""
    try:
        said = subprocess.run([python, "-c", ASK], check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"    {python} does not run: {error}")
        return None
    words = said.stdout.split()
    if said.returncode or words[1:] != ["True"]:
        lines = said.stderr.strip().splitlines() or ["it runs without the GIL"]
        print(f"    {python} is passed over: {lines[-1 if lines[0].startswith('Traceback') else 0]}")
        return None
    return words[0]


def find_pythons(versions: list[str], given: dict[str, str]) -> dict[str, str]:
    """An interpreter for each version that is here: named by MATRIX_PYTHONS, on the path, or pyenv's."""
    named: dict[str, str] = {}
    for python in os.environ.get("MATRIX_PYTHONS", "").split():
        full = version_of(python)
        if full is not None:
            named.setdefault(full.rpartition(".")[0], python)
    found = {}
    for version in versions:
        candidates = [given[version] + "/bin/python"] if version in given else []
        candidates += [named[version]] if version in named else []
        on_path = shutil.which(f"python{version}")
        candidates += [on_path] if on_path else []
        candidates += of_pyenv(version)
        for python in candidates:
            if (version_of(python) or "").rpartition(".")[0] == version:
                found[version] = python
                break
    return found


def of_pyenv(version: str) -> list[str]:
    """Those in pyenv's folder, the newest first."""
    root = os.environ.get("PYENV_ROOT", "")
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], check=False, capture_output=True, text=True).stdout.strip() or root
    folders = glob.glob(os.path.join(root or os.path.expanduser("~/.pyenv"), "versions", f"{version}.*"))
    newest_first = sorted(folders, key=lambda folder: [int(n) for n in NUMBERS.findall(os.path.basename(folder))])[::-1]
    return [os.path.join(folder, "bin", "python") for folder in newest_first]


def second_to(first: str | None, pythons: dict[str, str]) -> dict[str, str]:
    """The newest supported one that is of another version than the first."""
    others = [v for v in pythons if v in SUPPORTED and (first is None or not first.startswith(v + "."))]
    return {v: pythons[v] for v in others[-1:]}


# ---------------------------------------------------------------------------------------------------- one run


def run_one(
    version: str, python: str, given: str | None, torch: str, limit: float | None, arguments: list[str]
) -> dict[str, object]:
    """The tests on one Python, with this PyTorch or the pinned one; the row of the table."""
    full = version_of(python)
    row: dict[str, object] = {"python": full or version, "torch": torch or "-", "failed": 0, "result": ""}
    print(f"==> Python {full}, PyTorch {torch or 'as pinned'}: {python}", flush=True)
    start = time.monotonic()
    folder = environment_of(version, given, torch)
    if given is None and not set_up(folder, python, torch, limit):
        row["result"] = "no environment"
        row["failed"] = int(version in SUPPORTED and limit is None)
        return row
    executable = os.path.join(folder, "bin", "python")
    # As `make test` runs them: see the Makefile.
    settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": "src"}
    environment = {**os.environ, **settings}
    if given is not None:
        subprocess.run([executable, "-m", "foregrad", "build-native"], check=False, cwd=ROOT, env=environment)
    asked = [executable, "-c", "import torch; print(torch.__version__)"]
    row["torch"] = subprocess.run(asked, check=False, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    row["set up"] = time.monotonic() - start
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as reports:
        report = os.path.join(reports, "report.xml")
        command = [
            executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            os.environ.get("JOBS", "2"),
            "--dist",
            "worksteal",
            f"--junitxml={report}",
            *arguments,
        ]
        status = subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode
        row.update(numbers_of(report))
    row["time"] = time.monotonic() - start
    row["result"] = row["result"] or ("passed" if status == 0 else f"pytest ended with {status}")
    row["failed"] = row["failed"] or int(status != 0)
    return row


def environment_of(version: str, given: str | None, torch: str) -> str:
    """The folder of the virtual environment of a run."""
    return given or (f".venv-torch-{torch}" if torch else f".venv-{version}")


def set_up(folder: str, python: str, torch: str, limit: float | None) -> bool:
    """Make the environment, or bring it up to date, as `make setup` does."""
    command = [
        "make",
        "--no-print-directory",
        "setup",
        f"VENV={folder}",
        f"PYTHON={python}",
        f"TORCH={torch}",
        "FOREGRAD_PYTHON=",
        "SETUP=yes",
    ]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"    no environment after {limit:.0f} s: given up", flush=True)
        return False
    if status:
        print("    no environment: see above", flush=True)
    return status == 0


def numbers_of(report: str) -> dict[str, object]:
    """What a report of pytest's says: passed, failed, skipped."""
    try:
        suites = list(ET.parse(report).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return {"result": "ended early", "failed": 1}
    count = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {"passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"]}


def print_table(rows: list[dict[str, object]]) -> None:
    print(f"\n{'Python':8} {'torch':14} {'passed':>7} {'failed':>7} {'skipped':>8} {'set-up':>8} {'tests':>8}")
    for row in rows:
        times = [f"{row[key]:.0f} s" if key in row else "-" for key in ("set up", "time")]
        numbers = [str(row.get(key, "-")) for key in ("passed", "failed", "skipped")]
        print(
            f"{row['python']:8} {row['torch']:14} {numbers[0]:>7} {numbers[1]:>7} {numbers[2]:>8} {times[0]:>8} {times[1]:>8}  {row['result']}"
        )
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
