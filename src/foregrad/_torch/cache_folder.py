"""The folder for files of PyTorch's compilers. If it can't be written, importing them fails.

Importing `torch._dynamo`, as fake tensors do, makes the folder. `why_no_folder()` must be called before: if the folder
can't be made or written, a temporary folder takes its place for the process. Checked on torch 2.13.0.
"""

from __future__ import annotations

import atexit
import functools
import getpass
import logging
import os
import re
import shutil
import tempfile

log = logging.getLogger("foregrad")

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@functools.cache
def why_no_folder() -> str | None:
    """None if there is a folder to write to; else the reason. After this call the rest of PyTorch can be imported."""
    folder = os.path.abspath(os.environ.get(_VARIABLE) or _usual())
    why = _fault(folder)
    if why is None:
        os.environ[_VARIABLE] = folder  # as PyTorch does
        return None
    try:
        other = tempfile.mkdtemp(prefix="foregrad-cache-")
    except OSError:
        os.environ[_VARIABLE] = os.sep  # exists, so PyTorch can be imported
        return f"its cache folder {folder} can't be written ({why}), and there is no temporary one"
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    os.environ[_VARIABLE] = other
    log.warning(
        "the cache folder of PyTorch's compilers, %s, can't be written (%s): kernels are kept in a temporary folder "
        "and compiled again in the next process. Set %s to a folder of yours.",
        folder,
        why,
        _VARIABLE,
    )
    return None


def _usual() -> str:
    """PyTorch's default folder."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    try:
        parent = tempfile.gettempdir()
    except OSError:
        parent = os.path.join(os.sep, "tmp")
    return os.path.join(parent, "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _fault(folder: str) -> str | None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
