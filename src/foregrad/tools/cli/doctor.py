"""`foregrad doctor`: installed packages, working parts, the default backend; and `build-native`."""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

import foregrad
from foregrad._native.build import BuildError, attempt, build, fault_of, find_library
from foregrad.tools._torch.tools import missing, untested

from .cache import store_here
from .screen import add_json, print_json


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="versions, the compiler, the C++ part, the GPU, and the backend that `auto` picks",
        description="Lists foregrad's environment on this machine. Exit status: 0 all well, 1 something is broken.",
        epilog="example: foregrad doctor --json",
    )
    add_json(parser)
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command; 1 when something is broken."""
    findings, faults = _findings()
    if options.json:
        print_json({**findings, "broken": faults})
        return 1 if faults else 0
    width = max(map(len, findings))
    for name, value in findings.items():
        print(f"{name:<{width}}  {value}")
    for fault in faults:
        print(f"broken: {fault}")
    return 1 if faults else 0


def _findings() -> tuple[dict[str, Any], list[str]]:
    """The findings by name, and the faults."""
    faults: list[str] = []
    refused = store_here().refused()
    findings = {
        "foregrad": f"{foregrad.__version__}, in {foregrad.__path__[0]}",
        "Python": f"{platform.python_version()} ({platform.platform()})",
        "PyTorch": f"{torch.__version__}, {untested() or 'one of the tested versions'}",
        "C++ compiler": _compiler() or "none",
        "C++ part": _native(faults),
        "GPU": _gpus(),
        "backend auto": _auto(),
        "cache": refused or f"{store_here().folder}",
        "private names": _private_names(faults),
    }
    return findings, faults


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def _native(faults: list[str]) -> str:
    path = find_library(torch.__version__)
    if path is None:
        failed = attempt(torch.__version__)
        failed = failed if failed is not None or _compiler() else "there is no C++ compiler"
        why = "is being built" if failed == "" else f"not built ({failed})" if failed else "not built"
        return f"{why}, calls go through Python: `foregrad build-native` builds it"
    fault = fault_of(path)
    if fault is None:
        return str(path)
    faults.append(f"the C++ part in {path}: {fault}. `foregrad build-native --again` builds it")
    return f"not used: {fault}"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _auto() -> str:
    devices = [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()
    parts, why_not = [], foregrad.get_backend("inductor").why_not
    for device in devices:
        reason = why_not([device]) if why_not else None
        picked = "inductor" if reason is None else f"eager, for Inductor can't compile here: {reason}"
        parts.append(picked if len(devices) == 1 else f"{device}: {picked}")
    return "; ".join(parts)


def _private_names(faults: list[str]) -> str:
    """The private names of PyTorch that foregrad needs and that this version lacks or has changed."""
    gone = missing()
    faults += [f"{name}: {what}. Instead: {instead}" for name, what, instead in gone if instead.startswith("nothing")]
    return ", ".join(f"{name} ({what}; instead: {instead})" for name, what, instead in gone) or "all there"


# -------------------------------------------------------------------- build-native
# `foregrad build-native`: compile the C++ part of calls for the Python and the PyTorch that are here.


def add_build_native(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "build-native",
        help="compile the C++ part, to take some microseconds off each call",
        description="Compiles the C++ part of calls for the installed Python and PyTorch: half a minute, with g++ or "
        "clang++ (or the compiler in CXX). Without the C++ part calls go through Python, with equal "
        "results. Exit status: 0 it is built, 1 it can't be built.",
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
    print("compiling the C++ part (half a minute) ...", file=sys.stderr, flush=True)
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
