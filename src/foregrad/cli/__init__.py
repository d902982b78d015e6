"""The command `foregrad`: argparse over plain functions, one file a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import foregrad
from foregrad.cli.cache import add_cache
from foregrad.cli.demo import add_demo
from foregrad.cli.inspect import add_inspect
from foregrad.cli.native import add_build_native

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process) and return its exit code."""
    parser = argparse.ArgumentParser(prog="foregrad", description="Ahead-of-time autograd for PyTorch.")
    parser.add_argument("--version", action="version", version=f"foregrad {foregrad.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    add_demo(commands)
    add_inspect(commands)
    add_cache(commands)
    add_build_native(commands)
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130  # what a shell gives for a command ended by Ctrl-C
