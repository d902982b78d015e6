"""`foregrad check-compiler NAME` and `foregrad check-partitioner NAME`: the suite from the command line."""

from __future__ import annotations

import argparse
import sys

from foregrad.errors import BackendError, ForegradError
from foregrad.tools.cli.screen import add_json, choose_screen, print_json

from .check import check_compiler, check_partitioner

_STATUS = "Exit status: 0 nothing is wrong, 1 something is wrong or crashes, 2 no such compiler, case or dtype."


def add_check_compiler(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "check-compiler",
        help="check a compiler of graphs: operators, small programs, calls, threads, models",
        description="Hands the compiler forward and backward graphs, in child processes, and compares with eager. "
        "For a fault it names the operator and writes a program that shows it. " + _STATUS,
        epilog="example: foregrad check-compiler my_package.compiler:compile --only 'operators/*' --json",
    )
    parser.add_argument("target", metavar="NAME", help="package.module:name, file.py:name, or a registered backend")
    _add_options(parser)
    parser.set_defaults(run=run_check, check=check_compiler)


def add_check_partitioner(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "check-partitioner",
        help="check a function that splits joint graphs into forward and backward",
        description="Splits joint graphs, runs the halves on eager's kernels in child processes, and compares with "
        "eager. " + _STATUS,
        epilog="example: foregrad check-partitioner my_package.split:partition",
    )
    parser.add_argument("target", metavar="NAME", help="package.module:name or file.py:name")
    _add_options(parser)
    parser.set_defaults(run=run_check, check=check_partitioner)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="all operators of PyTorch's database, in seven dtypes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help=("only the cases with these names")
    )
    parser.add_argument("--dtype", action="append", default=[], help="of the operators, in place of the suite's")
    parser.add_argument("--jobs", type=int, default=2, help="child processes (default: 2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one case (default: 120)")
    parser.add_argument("--in-process", action="store_true", help="no child processes: a crash ends the command")
    parser.add_argument("--folder", help="where to write programs (default: new folders for temporary files)")
    add_json(parser)


def run_check(options: argparse.Namespace) -> int:
    """Run a command; 0 when nothing is wrong."""
    screen = choose_screen(plain=False, out=sys.stderr)
    try:
        report = options.check(
            options.target,
            size="full" if options.full else "short",
            only=options.only,
            dtypes=options.dtype,
            isolated=not options.in_process,
            jobs=options.jobs,
            timeout=options.timeout,
            folder=options.folder,
            progress=lambda done, name: screen.say(f"{done:5d}  {name}"),
        )
    except (ValueError, TypeError, BackendError, ForegradError) as error:
        print(f"foregrad: {error}", file=sys.stderr)
        return 2
    print_json(report.to_json()) if options.json else print(report)
    return 0 if report.ok else 1


COMMANDS = (add_check_compiler, add_check_partitioner)
