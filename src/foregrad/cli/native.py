"""`foregrad build-native`: compile the C++ part of calls for the Python and the PyTorch that are here."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from foregrad._native.build import BuildError, build, fault_of, find_library


def add_build_native(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "build-native",
        help="compile the C++ part, which takes some microseconds off each call",
        description="Compiles the C++ part of calls for the Python and the PyTorch that are here: half a minute, with "
        "g++ or clang++ (or what CXX names). Without it calls go through Python, with the same results. "
        "Exit status: 0 it is there, 1 it can't be built.",
        epilog="example: foregrad build-native",
    )
    parser.add_argument("--folder", type=Path, help="where to put it (default: beside foregrad, or the user's cache)")
    parser.add_argument("--again", action="store_true", help="also when it is there already")
    parser.add_argument("--verbose", action="store_true", help="show all that the compiler says where it fails")
    parser.set_defaults(run=run_build_native)


def run_build_native(options: argparse.Namespace) -> int:
    """Run the command; 0 when the library is there, 1 when it can't be built."""
    library = find_library(torch.__version__)
    if library is not None and fault_of(library) is None and not options.again and options.folder is None:
        print(f"there already: {library}")
        return 0
    print("compiling the C++ part, which takes half a minute ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        library = build(options.folder)
    except BuildError as error:
        print(f"not built, so calls go through Python: {error}", file=sys.stderr)
        if options.verbose:
            print(error.details, file=sys.stderr)
        return 1
    print(f"built in {time.perf_counter() - start:.0f} s: {library}")
    return 0
