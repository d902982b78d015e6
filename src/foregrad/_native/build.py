"""Compiles the C++ part of calls, with the compiler and the PyTorch that are there.

Only the standard library, and nothing of foregrad: the build backend runs this file by itself, without PyTorch.

A library is named for the sources, the PyTorch and the Python that it was made for, and only looked for by that name:
when one changes, calls go through Python until it is built again: on request, when foregrad is installed, or by a
process in the background that the first compiled function starts (`FOREGRAD_BUILD_NATIVE=0`: not these two). At its end
stand a checksum and the build of PyTorch that it is for: a file without both, or with a part missing, is not loaded
(loading half a library can end the process), nor is a file that somebody else could have put there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
_UNITS = (
    "held.cpp", "node.cpp", "node_type.cpp", "function.cpp", "checks.cpp", "memory.cpp", "observer.cpp",
    "diverted.cpp", "attributes.cpp", "module.cpp",
)  # fmt: skip
_HEADERS = ("program.h",)
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_QUIET = ("-Wno-missing-field-initializers",)  # Python's tables leave most of their fields at zero


_LONGEST_S = 900  # a build that takes longer was killed
_SEAL = b"foregrad-native-1:"
_SUM = hashlib.sha256().digest_size


class BuildError(Exception):
    """The library can't be built here: the message says why in a line. `details`: the command, and all that it said."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def find_torch() -> tuple[Path, str]:
    """(folder, version) of the PyTorch that this Python would import, without importing it."""
    folders = [Path(sysconfig.get_path(kind)) / "torch" for kind in ("purelib", "platlib")]
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        folders.insert(0, Path(found.origin).parent)
    for folder in folders:
        if (folder / "version.py").exists():
            version = re.search(r"^__version__ = ['\"](.+)['\"]", (folder / "version.py").read_text(), re.MULTILINE)
            if version is not None:
                return folder, version[1]
    raise BuildError("there is no PyTorch to build for")


def library_name(torch_version: str) -> str:
    """The name of the library for this source, this Python, and that PyTorch."""
    digest = hashlib.sha256(_SEAL)
    for name in (*_UNITS, *_HEADERS):
        digest.update((HERE / name).read_bytes())
    python = sysconfig.get_config_var("SOABI") or f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    return f"foregrad_native-torch{torch_version}-{python}-{digest.hexdigest()[:12]}.so"


def find_library(torch_version: str) -> Path | None:
    """The library for that PyTorch, if it was built: the first that may be loaded, else the first that may not."""
    name = library_name(torch_version)
    found = [folder / name for folder in _folders() if (folder / name).exists()]
    return next((path for path in found if fault_of(path) is None), found[0] if found else None)


def fault_of(path: Path) -> str | None:
    """Why a library is not to be loaded; None when it is whole, for this PyTorch, and nobody else's to write."""
    try:
        for place in (path.resolve(), path.resolve().parent):
            status = place.stat()
            # Whoever can change this file can change the library too.
            if hasattr(os, "geteuid") and status.st_uid not in (0, os.geteuid(), HERE.stat().st_uid):
                return f"{place} belongs to a different user"
            if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
                return f"everybody may write to {place}"
        content = path.read_bytes()
    except OSError as error:
        return f"it can't be read: {error}"
    body, seal = content[: -len(_seal(b""))], content[-len(_seal(b"")) :]
    if not seal.startswith(_SEAL):
        return "a part is missing, or it was built with different settings"
    if seal[:-_SUM] != _seal(b"")[:-_SUM]:
        return "it was built for a different build of PyTorch"
    return None if seal == _seal(body) else "its content has changed since the build"


def _seal(body: bytes) -> bytes:
    """The end of a library: a word, the build of PyTorch, and a checksum of both and all before."""
    folder, _ = find_torch()
    start = _SEAL + hashlib.sha256((folder / "version.py").read_bytes()).digest()
    return start + hashlib.sha256(start + body).digest()


def build(folder: Path | None = None) -> Path:
    """Compile the library into `folder`, by default beside the sources, or else into the user's cache.

    Takes half a minute of one core. Raises `BuildError` where the build fails.
    """
    if sys.platform == "win32":
        raise BuildError("building on Windows is not supported")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("a Python without a global lock is not supported")
    torch, version = find_torch()
    include = torch / "include"
    python = Path(sysconfig.get_path("include"))
    if not (include / "ATen" / "core" / "Tensor.h").exists():
        raise BuildError(f"the PyTorch in {torch} has no headers")
    if not (python / "Python.h").exists():
        raise BuildError(f"this Python has no headers: there is no {python / 'Python.h'}")
    target = (folder or next(f for f in _folders() if _writable(f))) / library_name(version)
    command = [
        *_compiler(),
        *_FLAGS,
        *_QUIET,
        *_options_for(include),
        f"-I{HERE}",
        *(
            part
            for path in (include, include / "torch" / "csrc" / "api" / "include", python)
            for part in ("-isystem", str(path))
        ),
        *("-x", "c++", "-"),
        f"-L{torch / 'lib'}",
        *("-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]
    # All files are one unit: PyTorch's headers are most of the work.
    source = "".join(f'#include "{unit}"\n' for unit in _UNITS)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made.so"
        done = subprocess.run([*command, "-o", str(made)], input=source, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "it said nothing")
            raise BuildError(
                f"{Path(command[0]).name} does not compile it with PyTorch {version}: {first.strip()}",
                f"{' '.join(command)}\n{done.stderr}",
            )
        with made.open("ab") as file:
            file.write(_seal(made.read_bytes()))
            file.flush()
            os.fsync(file.fileno())
        made.chmod(0o755)
        made.replace(target)  # in one step: another process may be looking for the file
    for other in target.parent.glob(target.name[:-15] + "*.so"):  # of other sources
        if other != target:
            other.unlink(missing_ok=True)
    _mark(target).unlink(missing_ok=True)
    return target


def build_in_background(torch_version: str) -> bool:
    """Start a process that builds the library for the processes that come later. Nothing waits for it.

    False where it is switched off, where there is no compiler, where a building process runs already, or failed: with a
    compiler, each library is tried once.
    """
    folder = next(filter(_writable, reversed([*_folders()])), None)  # the user's cache, rather than the installation
    if os.environ.get("FOREGRAD_BUILD_NATIVE", "1") == "0" or sys.platform == "win32" or folder is None:
        return False
    mark = _mark(folder / library_name(torch_version))
    try:
        if mark.exists() and not mark.stat().st_size and time.time() - mark.stat().st_mtime > _LONGEST_S:
            mark.unlink()
        _compiler()  # without one there is no mark: somebody may install one
        mark.touch(exist_ok=False)
        search = os.pathsep.join(filter(None, [str(find_torch()[0].parent), os.environ.get("PYTHONPATH")]))
        subprocess.run(
            [sys.executable, str(HERE / "build.py"), str(mark)],
            env={**os.environ, "PYTHONPATH": search},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, BuildError):
        return False
    return True


def attempt(torch_version: str) -> str | None:
    """How far a build in the background is: why it failed, "" while it runs, None where none was begun."""
    marks = (_mark(folder / library_name(torch_version)) for folder in _folders())
    return next((mark.read_text() for mark in marks if mark.exists()), None)


def _mark(target: Path) -> Path:
    """A file that is there, empty, while a process in the background builds `target`; then it says why that failed."""
    return target.with_suffix(".building")


def _folders() -> Iterator[Path]:
    yield HERE
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foregrad"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _compiler() -> list[str]:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"there is no C++ compiler: looked for {', '.join(names)}")
    return [found, *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]


def _options_for(include: Path) -> list[str]:
    """PyTorch's changes since 2.11, by its headers: nodes of autograd were counted by shared_ptr, and outputs were
    given to a node without returning their node.
    """
    autograd = include / "torch" / "csrc" / "autograd"
    names = ("node.h", "function.h", "custom_function.h")
    text = "".join((autograd / name).read_text() for name in names if (autograd / name).exists())
    shared = ["-DFOREGRAD_SHARED_NODES"] if "enable_shared_from_this<Node>" in text else []
    return shared + (["-DFOREGRAD_ATTACHED_NODE"] if "fire_node_creation_hooks(attached_node)" in text else [])


def _build_with_mark(mark: Path) -> None:
    """Leave the starting process, which waits until then; build; note at the mark why the build failed."""
    if os.fork():
        return
    os.setsid()
    os.nice(10)
    try:
        build(mark.parent)
    except BuildError as error:
        mark.write_text(str(error))


if __name__ == "__main__":
    _build_with_mark(Path(sys.argv[1]))
