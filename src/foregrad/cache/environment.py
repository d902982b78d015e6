"""What results depend on that is the same for the whole process: versions, sources, the processor."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterable
from typing import Any

import torch

from .._torch.settings import settings

__all__ = ["devices", "process", "settings_that_matter"]

_OF_NO_MATTER = ("PrinterOptions.", "warnAlways", "recursion limit", "numpy.seterr")


@functools.cache
def process() -> dict[str, Any]:
    """Versions, and the sources of foregrad, which may be changed under one version."""
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "foregrad": str(getattr(package, "__version__", "")),
        "sources": _digest_of(os.path.dirname(os.path.abspath(str(package.__file__)))),
        "torch": [str(torch.__version__), str(torch.version.git_version)],
        "python": [platform.python_implementation(), platform.python_version()],
        "machine": [sys.platform, platform.machine(), torch.backends.cpu.get_cpu_capability()],
    }


def _digest_of(folder: str) -> str:
    """A digest of the Python files under a folder, by their names and contents."""
    found = hashlib.sha256()
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(place, name)
                with open(path, "rb") as file:
                    content = file.read()
                found.update(f"{os.path.relpath(path, folder)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def devices(used: Iterable[torch.device]) -> list[Any]:
    """The accelerators that a graph is for, by their names: kernels and plans differ from one to another."""
    found = []
    for device in sorted(set(used), key=str):
        name = ""
        if device.type == "cuda":
            name = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
        found.append([str(device), name])
    return found


def settings_that_matter() -> dict[str, Any]:
    """The settings of the thread and of PyTorch that what is captured, split and compiled depends on."""
    return {name: value for name, value in settings().items() if not name.startswith(_OF_NO_MATTER)}
