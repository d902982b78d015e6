"""`foregrad verify FILE.py:NAME`: compiled against eager, stage by stage."""

from __future__ import annotations

import argparse

import foregrad
from foregrad.cli.screen import add_json, print_json
from foregrad.cli.target import add_target, load_target


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "verify",
        help="compare a compiled function with eager, and name the first operator that is wrong",
        description="Runs a function or module eagerly and compiled, on copies, and compares values, gradients, "
        "strides and aliasing, stage by stage. Of what is wrong it names the first operator and writes a program that "
        "shows it. Exit status: 0 equal or rounding, 1 wrong, 2 no such target, 3 it can't be compiled.",
        epilog="example: foregrad verify model.py:net --inputs batch --order 2",
    )
    add_target(parser)
    parser.add_argument("--order", type=int, default=1, help="how many times to differentiate (default: 1)")
    parser.add_argument("--partition", help="as for foregrad.compile")
    parser.add_argument("--folder", help="where to write the program (default: a new folder for temporary files)")
    add_json(parser)
    parser.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    """Run the command; 0 when nothing is wrong."""
    function, args, kwargs = load_target(options)
    result = foregrad.verify(
        function,
        *args,
        order=options.order,
        backend=options.backend,
        partition=options.partition,
        folder=options.folder,
        **kwargs,
    )
    print_json(result.to_json()) if options.json else print(result)
    return 0 if result.ok else 1
