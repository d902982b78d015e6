"""`foregrad explain FILE.py:NAME`: what compiling does to a function, and what it costs."""

from __future__ import annotations

import argparse
import sys

import foregrad
from foregrad.cli.screen import add_json
from foregrad.cli.target import add_target, load_target


def add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "explain",
        help="what compiling does to a function: memory, time, guards, what runs eagerly and why, advice",
        description="Compiles a function or module, measures a call, and reports. Exit status: 0, "
        "2 no such target, 3 it can't be compiled.",
        epilog="example: foregrad explain model.py:net --html report.html",
    )
    add_target(parser)
    parser.add_argument("--partition", help="as for foregrad.compile")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    add_json(parser)
    parser.set_defaults(run=run_explain)


def run_explain(options: argparse.Namespace) -> int:
    """Run the command."""
    function, args, kwargs = load_target(options)
    report = foregrad.explain(function, *args, backend=options.backend, partition=options.partition, **kwargs)
    if options.json:
        print(report.to_json(indent=2))
    else:
        report.show()
    if options.html:
        print(f"the report is in {report.save(options.html)}", file=sys.stderr if options.json else sys.stdout)
    return 0
