"""The environment that results depend on: versions, sources, the processor, the settings in force."""

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

_OF_NO_MATTER = ("PrinterOptions.", "warnAlways", "recursion limit", "numpy.seterr")


@functools.cache
def process() -> dict[str, Any]:
    """Versions, and a digest of foregrad's sources, which may change under one version."""
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "foregrad": str(getattr(package, "__version__", "")),
        "sources": _digest_of(os.path.dirname(os.path.abspath(str(package.__file__)))),
        "torch": [str(torch.__version__), str(torch.version.git_version)],
        "python": [platform.python_implementation(), platform.python_version()],
        "machine": [sys.platform, platform.machine(), torch.backends.cpu.get_cpu_capability()],
    }


def _digest_of(folder: str) -> str:
    """A digest of the names and contents of the Python files under a folder."""
    sha256 = hashlib.sha256()
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(place, name)
                with open(path, "rb") as file:
                    content = file.read()
                sha256.update(f"{os.path.relpath(path, folder)}\0{len(content)}\0".encode() + content)
    return sha256.hexdigest()


def devices(used: Iterable[torch.device]) -> list[Any]:
    """The devices of a graph, accelerators with their names: kernels and plans differ from one to another."""
    described = []
    for device in sorted(set(used), key=str):
        name = ""
        if device.type == "cuda":
            name = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
        described.append([str(device), name])
    return described


def settings_that_matter() -> dict[str, Any]:
    """The settings of the thread and of PyTorch that captures, partitions and compilations depend on."""
    return {name: value for name, value in settings().items() if not name.startswith(_OF_NO_MATTER)}
