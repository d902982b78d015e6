"""`FILE.py:NAME`: a function or module of a file, and its arguments."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_INPUTS = "example_inputs"


class TargetError(Exception):
    """The target can't be loaded; the message says why."""


class Target(NamedTuple):
    """A function or module, and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def add_target(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a target."""
    parser.add_argument(
        "target",
        metavar="FILE.py:NAME",
        help="a function or module in a file, or a class or function without arguments that makes a module",
    )
    parser.add_argument(
        "--inputs",
        metavar="NAME",
        help="its arguments: a tuple, dict or tensor in the file, or a function that makes one "
        f"(default: `{_INPUTS}`, or no arguments where the file has none)",
    )
    parser.add_argument("--backend", default="auto", help='as for foregrad.compile (default: "auto")')


def load_target(options: argparse.Namespace) -> Target:
    """Run the file and take the target out of it. Raises `TargetError`."""
    file, colon, name = options.target.rpartition(":")
    path = Path(file)
    if not colon or not name or path.suffix != ".py":
        raise TargetError(f"`{options.target}` is not of the form FILE.py:NAME")
    if not path.is_file():
        raise TargetError(f"there is no file {file}")
    module = _run(path)
    function = _attribute(module, name, file)
    has_inputs = options.inputs is not None or hasattr(module, _INPUTS)
    if isinstance(function, type) or (has_inputs and inspect.isfunction(function) and not _parameters(function)):
        function = function()
    if not callable(function):
        raise TargetError(f"`{name}` in {file} is a {type(function).__name__}, which can't be called")
    if not has_inputs:
        return Target(function, (), {})
    inputs = _attribute(module, options.inputs or _INPUTS, file)
    inputs = inputs() if callable(inputs) else inputs
    if isinstance(inputs, dict):
        return Target(function, (), inputs)
    return Target(function, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def _run(path: Path) -> Any:
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"foregrad_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _parameters(function: Callable[..., Any]) -> Any:
    return inspect.signature(function).parameters


def _attribute(module: Any, name: str, file: str) -> Any:
    value = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise TargetError(f"{file} has no `{name}`") from None
    return value
