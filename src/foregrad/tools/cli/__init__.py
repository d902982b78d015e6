"""The command `foregrad`: argparse over plain functions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import foregrad
from foregrad.errors import ForegradError

from .cache import add_cache
from .doctor import add_build_native, add_doctor
from .inspect import add_inspect
from .target import TargetError, add_bench, add_explain, add_plan, add_verify, error_of_target, load_module

__all__ = ["main"]

_Raw = argparse.RawDescriptionHelpFormatter
_EPILOG = """\
exit status: 0 done, and all is well; 1 the command found a difference, a damaged file or something broken;
2 wrong arguments, no such file, or no target that runs; 3 the target can't be compiled; 130 stopped by Ctrl-C; 141 the
reader of the output went away (`| head`)

example: foregrad doctor
"""


def main(arguments: Sequence[str] | None = None, more: Sequence[Callable[[Any], None]] = ()) -> int:
    """Run the command line `arguments` (default: the process's) and return its exit code.

    `more` are commands besides the package's: each gets the parsers to add its own to.
    """
    parser = argparse.ArgumentParser(
        prog="foregrad", description="Ahead-of-time autograd for PyTorch.", epilog=_EPILOG, formatter_class=_Raw
    )
    parser.add_argument("--version", action="version", version=f"foregrad {foregrad.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    for add in (
        add_demo,
        add_explain,
        add_verify,
        add_plan,
        add_bench,
        add_doctor,
        add_inspect,
        add_cache,
        add_build_native,
        *more,
    ):
        add(commands)
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except TargetError as error:
        print(f"foregrad: {error}", file=sys.stderr)
        return 2
    except ForegradError as error:
        print(f"foregrad: {type(error).__name__}: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130  # the shell's status of a command ended by Ctrl-C
    except BrokenPipeError:  # as of `| head`: the interpreter's own flush at the end must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the shell's status of a command ended by SIGPIPE
    except Exception as error:
        told = error_of_target(error, options.target) if hasattr(options, "target") else None
        if told is None:
            raise  # a fault in the command
        print(f"foregrad: {told}", file=sys.stderr)
        return 2


# -------------------------------------------------------------------- demo
# `foregrad demo`: the program in `examples/demo`, also in wheels.


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
        load_module("foregrad_demo", folder / "__init__.py")
    return sys.modules["foregrad_demo"]
