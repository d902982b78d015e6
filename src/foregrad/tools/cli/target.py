"""`FILE.py:NAME`: a function or module of a file with its arguments, and the commands that take one."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

import foregrad
from foregrad.errors import BackendError, ForegradError, did_you_mean
from foregrad.extend import is_house_file
from foregrad.graph.source import a_name

from ..explanation.measure import step_of, subject_of
from ..verification.compare import Verdict
from .screen import add_json, choose_screen, print_json

_INPUTS = "example_inputs"
_MOST_NAMES = 12


class TargetError(Exception):
    """The target can't be loaded or called; the message says why."""


def error_of_target(error: BaseException, target: str) -> TargetError | None:
    """The error of a user's file or target, on one line; None for a fault that is not the user's."""
    file = target.rpartition(":")[0] or target
    frames = list(traceback.extract_tb(error.__traceback__))
    lines = [(Path(frame.filename).resolve(), frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError):
        lines.append((Path(error.filename or "").resolve(), error.lineno))
    line = next((line for path, line in reversed(lines) if path == Path(file).resolve()), None)
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    if line is None and frames and is_house_file(frames[-1].filename) and not isinstance(error, TypeError):
        return TargetError(text) if isinstance(error, ValueError) else None
    where = f" (line {line})" if line is not None else ""
    return TargetError(f"{file if line is not None else target} raised {type(error).__name__}: {text}{where}")


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
    """Run the file and return its target. Raises `TargetError`."""
    file, colon, name = options.target.rpartition(":")
    path = Path(file)
    if not colon or not name or path.suffix != ".py":
        raise TargetError(f"`{options.target}` is not of the form FILE.py:NAME")
    if not path.is_file():
        raise TargetError(f"there is no file {file}")
    try:
        module = _run(path)
    except SystemExit as stopped:
        raise TargetError(f"{file} ends the process (sys.exit({stopped.code!r})) when it is run") from None
    function = _attribute(module, name, file)
    for backend in options.backend.split(","):
        _check_backend(backend)
    has_inputs = options.inputs is not None or hasattr(module, _INPUTS)
    if isinstance(function, type):
        function = _made(function, name, file)
    elif has_inputs and inspect.isfunction(function) and not _parameters(function):
        function = function()
    if not callable(function):
        raise TargetError(f"`{name}` in {file} is {a_name(type(function).__name__)}: it can't be called")
    if not has_inputs:
        return Target(function, (), {})
    inputs = _attribute(module, options.inputs or _INPUTS, file)
    inputs = inputs() if callable(inputs) else inputs
    if isinstance(inputs, dict):
        return Target(function, (), inputs)
    return Target(function, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def _check_backend(name: str) -> None:
    try:
        foregrad.get_backend(name)
    except BackendError as error:
        raise TargetError(str(error)) from None


def _made(cls: type, name: str, file: str) -> Any:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise TargetError(
            f"`{name}` in {file} is a class whose objects can't be made without arguments ({error}): write a "
            "function without arguments that makes an object, and name this function"
        ) from None
    except ValueError:  # a class without a signature
        pass
    return cls()


def _run(path: Path) -> Any:
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"foregrad_target_{path.stem}"
    sys.path.insert(0, str(path.parent.resolve()))
    return load_module(name, path)


def load_module(name: str, path: Path) -> Any:
    """Run a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
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
            raise TargetError(f"{file} has no `{name}`{_instead(module, name)}") from None
    return value


def _instead(module: Any, name: str) -> str:
    """The name that was meant, or the names that there are."""
    own = vars(module)
    found = [key for key, value in own.items() if getattr(value, "__module__", None) == module.__name__]
    found += [key for key, value in own.items() if isinstance(value, torch.nn.Module)]
    names = [key for key in dict.fromkeys(found) if callable(own[key]) and not key.startswith("_")]
    if close := did_you_mean(name, [*names, *own], ": did you mean `{}`?"):
        return close
    return f": it has {', '.join(names[:_MOST_NAMES])}{', ...' if len(names) > _MOST_NAMES else ''}" if names else ""


# -------------------------------------------------------------------- verify
# `foregrad verify FILE.py:NAME`: compiled against eager, stage by stage.


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "verify",
        help="compare a compiled function with eager, and name the first operator that is wrong",
        description="Runs a function or module eagerly and compiled, on copies, and compares values, gradients, "
        "strides and aliasing, stage by stage. Where they differ it names the first wrong operator and "
        "writes a program that shows the fault. Exit status: 0 equal or rounding, 1 wrong, 2 no such "
        "target, or a target that raises by itself or has no results, so that nothing was compared, 3 it "
        "can't be compiled.",
        epilog="example: foregrad verify model.py:net --inputs batch --order 2",
    )
    add_target(parser)
    parser.add_argument("--order", type=int, default=1, help="how many times to differentiate (default: 1)")
    parser.add_argument("--partition", help="as for foregrad.compile")
    parser.add_argument("--may-raise", action="store_true", help="exit with 0 also where both raise equal errors")
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
    if result.verdict is Verdict.NOTHING:
        return 0 if options.may_raise and result.differences else 2
    return 0 if result.ok else 1


# -------------------------------------------------------------------- explain
# `foregrad explain FILE.py:NAME`: the effects of compiling on a function, and its costs.


def add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "explain",
        help="the effect of compiling on a function: memory, time, guards, eager calls and why, advice",
        description="Compiles a function or module, measures a call, and reports. Exit status: 0, "
        "2 no such target, or one that raises, 3 it can't be compiled.",
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
        _save("report", report, options)
    return 0


def _save(name: str, found: Any, options: argparse.Namespace) -> None:
    try:
        path = found.save(options.html)
    except OSError as error:
        raise TargetError(f"{options.html} can't be written: {error.strerror}") from None
    print(f"the {name} is in {path}", file=sys.stderr if options.json else sys.stdout)


# -------------------------------------------------------------------- plan
# `foregrad plan FILE.py:NAME`: the memory and time of a training step, without running it.


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "plan",
        help="foresee the memory and the time of a training step on a device that need not be there",
        description="Captures a function or module (`meta` is allowed) and estimates a step: its peak, the values "
        "alive there, its time, and the effect of checkpointing, a budget or offloading on both. Exit "
        "status: 0, 1 no choice fits the device, 2 no such target, 3 it can't be planned, or nothing "
        "keeps to --budget.",
        epilog="example: foregrad plan model.py:net --device h100 --optimizer AdamW --budget 80GiB",
    )
    add_target(parser)
    parser.add_argument("--device", help="a100, h100, h200, b200, mi300x, l4 or cpu (default: by the tensors)")
    parser.add_argument("--budget", help='bytes with a unit, "80 GiB", or a share of the memory from 0.0 to 1.0')
    parser.add_argument("--optimizer", help="a name in torch.optim (default: none)")
    parser.add_argument("--mesh", help="ranks: fsdp=8, or dp=4,fsdp=8")
    parser.add_argument("--sizes", help="values that are not there, by line: model.py:41=128,model.py:50=0.5")
    parser.add_argument("--html", metavar="FILE", help="write the plan as one HTML file")
    add_json(parser)
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Run the command; 0 when a choice fits."""
    function, args, kwargs = load_target(options)
    _check_name("--device", options.device, {"cpu", *foregrad.planning.DEVICES})
    _check_name("--optimizer", options.optimizer, [n for n, v in vars(torch.optim).items() if isinstance(v, type)])
    settings = {"device": options.device, "budget": _budget(options.budget)}
    settings["mesh"] = _pairs("--mesh", "fsdp=8 or dp=4,fsdp=8", options.mesh)
    settings["sizes"] = _pairs("--sizes", "model.py:41=128", options.sizes)
    try:
        found = foregrad.plan(function, *args, optimizer=options.optimizer, **settings, **kwargs)
    except ValueError as error:
        if isinstance(error, ForegradError):
            raise
        raise TargetError(str(error)) from None
    print(found.to_json(indent=2) if options.json else found)
    if options.html:
        _save("plan", found, options)
    return 0 if found.best is not None else 1


def _check_name(option: str, name: str | None, known: Collection[str]) -> None:
    if name is not None and name.lower() not in map(str.lower, known):
        hint = did_you_mean(name, known, ": did you mean `{}`?") or f" among {', '.join(sorted(known))}"
        raise TargetError(f"{option} knows no `{name}`{hint}")


def _budget(text: str | None) -> Any:
    """A share where it is a number with a point, else bytes."""
    return float(text) if text is not None and re.fullmatch(r"[01]?\.\d*", text) else text


def _pairs(option: str, form: str, text: str | None) -> dict[str, int | float] | None:
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d*)?", number) for _, _, number in pairs):
        raise TargetError(f"{option} is of the form {form}, not {text!r}")
    return {name.strip(): float(number) if "." in number else int(number) for name, _, number in pairs}


# -------------------------------------------------------------------- bench
# `foregrad bench FILE.py:NAME`: a step, forward and backward, eager and compiled, in turn.


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "bench",
        help="time a step of a function, eager and compiled, in turn",
        description="Times calls with their backward, eager and compiled by each backend, in turn; the backward starts "
        "from ones for all outputs. Exit status: 0, 2 no such target, or one that raises, 3 it can't be compiled.",
        epilog="example: foregrad bench model.py:net --backend eager,inductor --steps 50",
    )
    add_target(parser)
    parser.add_argument("--steps", type=_positive, default=20, help="steps of each (default: 20)")
    add_json(parser)
    parser.set_defaults(run=run_bench)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def run_bench(options: argparse.Namespace) -> int:
    """Run the command."""
    target = load_target(options)
    steps = {"pytorch": _step(target, None)}
    steps |= {f"foregrad, {name}": _step(target, name) for name in options.backend.split(",")}
    screen = choose_screen(plain=False, out=sys.stderr)
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in steps}
    with screen.progress("steps", (options.steps + 1) * len(steps)) as advance:
        done = 0
        for number in range(options.steps + 1):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                took = time.perf_counter() - begin
                times[name].append(took) if number else first.setdefault(name, took)
                done += 1
                advance(done, name)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    base = median["pytorch"]
    results: list[dict[str, Any]] = [
        {"name": name, "first_s": first[name], "median_s": median[name], "ratio": median[name] / base} for name in steps
    ]
    if options.json:
        print_json(results)
        return 0
    rows = [
        (one["name"], f"{one['first_s']:.2f} s", f"{one['median_s'] * 1e3:.2f} ms", f"{one['ratio']:.2f}")
        for one in results
    ]
    choose_screen(plain=False).table(f"{options.steps} steps of each", ("", "first", "median", "ratio"), rows)
    return 0


def _step(target: Target, backend: str | None) -> Callable[[], None]:
    """One call with its backward, on copies of the function and its arguments."""
    subject = subject_of(target.function, target.args, target.kwargs)
    call = subject.function if backend is None else foregrad.compile(subject.function, backend=backend)
    return step_of(functools.partial(call, *subject.args, **subject.kwargs), subject.forget_gradients)
