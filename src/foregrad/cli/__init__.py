"""The command `foregrad`: argparse over plain functions, one file a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import foregrad
from foregrad.cli.bench import add_bench
from foregrad.cli.cache import add_cache
from foregrad.cli.demo import add_demo
from foregrad.cli.doctor import add_doctor
from foregrad.cli.explain import add_explain
from foregrad.cli.inspect import add_inspect
from foregrad.cli.native import add_build_native
from foregrad.cli.target import TargetError
from foregrad.cli.verify import add_verify
from foregrad.errors import ForegradError

__all__ = ["main"]

_Raw = argparse.RawDescriptionHelpFormatter
_EPILOG = """\
exit status: 0 done, and all is well; 1 the command found a difference, a damaged file or something broken;
2 wrong arguments, or no such target; 3 the target can't be compiled; 130 stopped by Ctrl-C

example: foregrad doctor
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="foregrad", description="Ahead-of-time autograd for PyTorch.", epilog=_EPILOG, formatter_class=_Raw
    )
    parser.add_argument("--version", action="version", version=f"foregrad {foregrad.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    for add in (add_demo, add_explain, add_verify, add_bench, add_doctor, add_inspect, add_cache, add_build_native):
        add(commands)
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        return int(options.run(options))
    except TargetError as error:
        print(f"foregrad: {error}", file=sys.stderr)
        return 2
    except ForegradError as error:
        print(f"foregrad: {type(error).__name__}: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130  # what a shell gives for a command ended by Ctrl-C
