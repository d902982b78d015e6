"""`foregrad demo`: the program in `examples/demo`, which a wheel carries too."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import foregrad


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command; the demo reads its own options."""
    parser = commands.add_parser(
        "demo", add_help=False, help="train a small GPT, eager and compiled side by side, and compare them bit by bit"
    )
    parser.set_defaults(run=lambda options: demo_package().main(options.rest), takes_rest=True)


def demo_package() -> ModuleType:
    """The demo as a package: from a wheel's copy, or else from the checkout that foregrad is run from."""
    package = Path(foregrad.__file__).parent
    folders = [parent / "examples" / "demo" for parent in (package, package.parents[1])]
    folder = next(folder for folder in folders if folder.is_dir())
    if "foregrad_demo" not in sys.modules:
        spec = importlib.util.spec_from_file_location("foregrad_demo", folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["foregrad_demo"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["foregrad_demo"]
