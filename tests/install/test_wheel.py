"""The wheel, installed where there is no checkout: what it carries, its command, its types."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

import foregrad

pytest.importorskip("hatchling", reason="the build backend is not installed (extra `dev`)")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SLOW = pytest.mark.slow


def run(*command, cwd, **environment):
    """Run a command that sees nothing of the checkout, nor a C++ part in the user's cache."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "FOREGRAD", "VIRTUAL"))
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "FOREGRAD_BUILD_NATIVE": "0", "XDG_CACHE_HOME": str(cwd / "cache"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    done = run(*command, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder of a new environment with the wheel in it, which sees this one's PyTorch behind it."""
    folder = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder).returncode == 0
    python = folder / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    done = run(*command, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "behind.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder


def test_the_version_is_a_release(wheel):
    assert re.fullmatch(r"\d+\.\d+\.\d+", foregrad.__version__)
    assert wheel.name == f"foregrad-{foregrad.__version__}-py3-none-any.whl"


def test_it_carries_the_package_the_demo_the_sources_of_the_cpp_part_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    there = {"py.typed", "examples/demo/__init__.py", "_native/node.cpp", "_native/program.h", "tools/cli/__init__.py"}
    assert {f"foregrad/{name}" for name in there} <= set(names)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"foregrad", f"foregrad-{foregrad.__version__}.dist-info"}
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_it_is_what_runs_there(installed):
    python = installed / "venv" / "bin" / "python"
    done = run(python, "-c", "import foregrad; print(foregrad.__file__, foregrad.__version__)", cwd=installed)
    assert done.stdout.startswith(str(installed)), done.stderr
    assert done.stdout.split()[1] == foregrad.__version__


@SLOW
def test_its_command_runs(installed):
    command = installed / "venv" / "bin" / "foregrad"
    demo = run(command, "demo", "--steps", "2", "--plain", cwd=installed)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.splitlines()[-1].startswith("Equal bit for bit")
    doctor = run(command, "doctor", cwd=installed)
    assert str(installed) in doctor.stdout
    assert "`foregrad build-native` builds it" in doctor.stdout


@SLOW
def test_torch_compile_finds_it_without_an_import(installed):
    program = "import torch; print(torch.compile(torch.sin, backend='foregrad')(torch.zeros(2)).tolist())"
    done = run(installed / "venv" / "bin" / "python", "-c", program, cwd=installed)
    assert done.stdout.strip() == "[0.0, 0.0]", done.stderr


def checked(installed, checker):
    """The (file, line) pairs that a type checker finds fault with in the two programs."""
    for name in ("client.py", "mistakes.py"):
        shutil.copy(HERE / name, installed / name)
    done = run(*checker, "client.py", "mistakes.py", cwd=installed)
    found = re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", done.stdout)
    assert found, done.stdout + done.stderr
    return sorted({(file, int(line)) for file, line in found}), done.stdout


def mistakes():
    lines = (HERE / "mistakes.py").read_text().splitlines()
    return [("mistakes.py", number) for number, line in enumerate(lines, 1) if "# wrong" in line]


@SLOW
def test_mypy_sees_its_types(installed):
    pytest.importorskip("mypy")
    python = installed / "venv" / "bin" / "python"
    # `Tensor.backward` has no types in PyTorch.
    strict = ["--strict", "--allow-untyped-calls"]
    # What it knows of PyTorch is kept between runs: to read that takes it most of its time.
    kept = Path(tempfile.gettempdir()) / f"foregrad-tests-mypy-{os.getuid()}"
    checker = [sys.executable, "-m", "mypy", *strict, "--cache-dir", kept, "--python-executable", python]
    found, said = checked(installed, checker)
    assert found == mistakes(), said


@SLOW
@pytest.mark.skipif(
    shutil.which("pyright") is None and importlib.util.find_spec("pyright") is None, reason="pyright is not installed"
)
def test_pyright_sees_its_types(installed):
    python = installed / "venv" / "bin" / "python"
    command = ["pyright"] if shutil.which("pyright") else [sys.executable, "-m", "pyright"]
    found, said = checked(installed, [*command, "--pythonpath", python])
    assert found == mistakes(), said
