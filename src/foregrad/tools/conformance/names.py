"""`package.module:name` and `file.py:name`: the name of a function that a new process can import."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from foregrad.tools.cli.target import load_module


class UnknownNameError(ValueError):
    """A text names nothing that can be imported."""


def load(name: str) -> Any:
    """The value that a text names. Raises `UnknownNameError`."""
    where, colon, path = name.rpartition(":")
    if not colon or not where or not path:
        raise UnknownNameError(f"`{name}` is not of the form package.module:name or file.py:name")
    try:
        module = _file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        return functools.reduce(getattr, path.split("."), module)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise UnknownNameError(f"`{name}` can't be imported: {error}") from error


def _file(path: Path) -> Any:
    name = f"foregrad_checked_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    sys.path.insert(0, str(path.parent.resolve()))
    return load_module(name, path)


def name_for(value: Any) -> str:
    """The text that names a function, for a new process. Raises `UnknownNameError` where there is none."""
    if isinstance(value, str):
        return value
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or path is None or "<" in path:
        raise UnknownNameError(
            f"{value!r} has no name that a child process can import: define it at the top of a module, or leave "
            "`isolated` out"
        )
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or module.startswith("foregrad_checked_"):
        if file is None:
            raise UnknownNameError(f"`{path}` is defined in no file, so that no other process can import it")
        return f"{file}:{path}"
    return f"{module}:{path}"
