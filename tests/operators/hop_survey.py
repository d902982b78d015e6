"""PyTorch's samples of higher-order operators, compiled: `python -m tests.operators.hop_survey`, or `make hops`.

Every sample of `hop_db`, with and without gradients, and the programs of `hop_programs`, through `foregrad.compile` and
through `torch.compile(backend="foregrad")`: equal to eager's, results and gradients, or raising as eager does, or
refused by name. Each runs in a process of its own, which is to end as it should. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import sys
import warnings
from typing import Any

DOORS = ("direct", "dynamo")
FINE = ("equal", "raises as eager", "refused")
TIMEOUT_S = 300


def compiled(function: Any, door: str, backend: str) -> Any:
    import torch

    import foregrad

    if door == "direct":
        return foregrad.compile(function, backend=backend, on_unsupported="raise")
    return torch.compile(function, backend="foregrad", options={"backend": backend, "on_unsupported": "raise"})


def cases() -> dict[str, Any]:
    """By name, what gives (function, arguments, keyword arguments); a name ends in `grad` where these require it."""
    import torch
    from torch.testing._internal.hop_db import hop_db

    from tests.operators.hop_programs import PROGRAMS
    from tests.parity.cases import samples_need_no_test

    samples_need_no_test()

    def sampled(entry: Any, number: int, grad: bool) -> Any:
        sample = list(entry.sample_inputs("cpu", torch.float32, requires_grad=grad))[number]
        return entry.op, (sample.input, *sample.args), sample.kwargs

    found: dict[str, Any] = {}
    for entry in hop_db:
        count = len(list(entry.sample_inputs("cpu", torch.float32, requires_grad=False)))
        for number in range(count):
            for grad in (False, True):
                name = f"{entry.name} {entry.variant_test_name} {number}{' grad' if grad else ''}"
                found[name] = lambda e=entry, n=number, g=grad: sampled(e, n, g)
    for name, make in PROGRAMS.items():
        for grad in (False, True):
            found[f"program {name}{' grad' if grad else ''}"] = lambda m=make, g=grad: (*m(g), {})
    return found


def outcome(function: Any, args: Any, kwargs: Any) -> Any:
    """Results, what is in the arguments afterwards, and gradients, of one call."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    torch.manual_seed(0)
    args, kwargs = tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs)
    )
    given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    results = [r for r in tree_leaves(function(*args, **kwargs)) if isinstance(r, torch.Tensor)]
    losses = [(r * torch.linspace(1, 2, r.numel()).view(r.shape)).sum() for r in results if r.requires_grad]
    if losses:
        sum(losses).backward()
    return [r.requires_grad for r in results], [*results, *given], [a.grad for a in given]


def differences(expected: Any, found: Any) -> str:
    """ "" where two outcomes are equal to the last bit, "last bits", or what is wrong."""
    import torch

    if expected[0] != found[0]:
        return f"requires_grad {found[0]}, eager {expected[0]}"
    exact = True
    for part in (1, 2):
        for one, other in zip(expected[part], found[part], strict=True):
            if (one is None) != (other is None):
                return f"a gradient is {other if other is None else 'there'}"
            if one is not None:
                if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
                    return f"{other.dtype} {tuple(other.shape)} {other.stride()}"
                exact = exact and torch.equal(one, other)
                if not torch.allclose(one.detach(), other.detach(), equal_nan=True):
                    return "values"
    return "" if exact else "last bits"


def refusal(error: BaseException | None) -> str:
    """The class of foregrad's refusal, where an error is or comes from one."""
    from foregrad.errors import ForegradError

    while error is not None:
        if isinstance(error, ForegradError):
            return type(error).__name__
        error = getattr(error, "inner_exception", None) or error.__cause__
    return ""


def verdict(case: Any, door: str, backend: str) -> str:
    """How a case went through a door."""
    import torch

    function, args, kwargs = case()
    torch._dynamo.reset()
    expected: Any
    try:
        expected = outcome(function, args, kwargs)
    except Exception as error:
        expected = error
    torch._dynamo.reset()
    call = compiled(function, door, backend)
    try:
        for _ in range(2):  # the second finds a compiled function
            found = outcome(call, args, kwargs)
            if isinstance(expected, Exception):
                return f"WRONG: eager raises {type(expected).__name__}"
            said = differences(expected, found)
            if said not in ("", "last bits"):
                return f"WRONG: {said}"
    except Exception as error:
        name = refusal(error)
        if name:
            return f"refused: {name}"
        if type(error) is type(expected):
            return f"raises as eager: {type(error).__name__}"
        return f"ERROR: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return f"equal{', gradients to the ' + said if said else ''}"


def _answer(connection: Any, case: Any, door: str, backend: str) -> None:
    """In the child: the verdict, through a pipe."""
    import torch

    # By one thread: autograd's threads, which all set it as they start, end a child that they find with its parent's.
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    connection.send(verdict(case, door, backend))


def _import_what_captures_do(doors: Any, backend: str) -> None:
    """Seconds that each child would take. No gradient is asked for, so that none of autograd's threads starts here."""
    import torch
    import torch._inductor.decomposition

    for door in doors:
        compiled(lambda x: x.sin() + 1, door, backend)(torch.ones(2))
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # a child's collections look at what it makes


def in_a_process(case: Any, door: str, backend: str) -> str:
    """The verdict of a child, or how that ended. It has PyTorch from its parent, which runs no threads of it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, case, door, backend))
    child.start()
    theirs.close()
    try:
        said = str(ours.recv()) if ours.poll(TIMEOUT_S) else f"CRASH: no answer after {TIMEOUT_S} s"
    except EOFError:
        said = ""
    if said.startswith("CRASH"):
        child.kill()
    child.join()
    return said if said and (child.exitcode == 0 or said.startswith("CRASH")) else f"CRASH: status {child.exitcode}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.operators.hop_survey", description=__doc__)
    parser.add_argument("--op", metavar="REGEX", default="", help="only cases whose name matches")
    parser.add_argument("--door", choices=DOORS, action="append", help="only this one")
    parser.add_argument("--backend", default="eager")
    opts = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    doors = opts.door or DOORS
    chosen = {name: case for name, case in cases().items() if re.search(opts.op, name)}
    width = max(map(len, chosen), default=0)
    bad, counts = 0, dict.fromkeys(FINE, 0)
    _import_what_captures_do(doors, opts.backend)
    print(f"{'case':{width}} | {' | '.join(doors)}")
    for name, case in chosen.items():
        said = [in_a_process(case, door, opts.backend) for door in doors]
        print(f"{name:{width}} | {' | '.join(said)}", flush=True)
        for text in said:
            kind = next((kind for kind in FINE if text.startswith(kind)), None)
            if kind is None:
                bad += 1
            else:
                counts[kind] += 1
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()) + f", {bad} WRONG, ERROR or CRASH")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
