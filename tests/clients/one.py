"""One client, trained for five steps in eager and compiled: `python -m tests.clients.one NAME` prints a line of JSON."""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import foregrad

from . import dynamics, language, probability, sound, structures, vision  # noqa: F401 - they fill the table
from .client import CLIENTS, Client, Program

__all__ = ["FORMS", "check"]

STEPS = 5


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def _loss(program: Program) -> Callable[..., torch.Tensor]:
    return lambda *batch: program.loss(program.module, *batch)


def _eager(program: Program) -> tuple[Callable[..., torch.Tensor], Any]:
    return _loss(program), None


def _module(program: Program) -> tuple[Callable[..., torch.Tensor], Any]:
    compiled = foregrad.compile(program.module, backend="eager", on_unsupported="eager")
    return lambda *batch: program.loss(compiled, *batch), compiled


def _function(program: Program) -> tuple[Callable[..., torch.Tensor], Any]:
    compiled = foregrad.compile(_loss(program), backend="eager", on_unsupported="eager")
    return compiled, compiled


def _pytorch(program: Program) -> tuple[Callable[..., torch.Tensor], Any]:
    return torch.compile(_loss(program), backend="aot_eager"), None


# The loss as one compiled function, the loss computed from a compiled module, and the first with PyTorch's own compiler.
FORMS = {"function": _function, "module": _module, "pytorch": _pytorch}


def _train(client: Client, form: Callable[[Program], Any]) -> tuple[dict[str, Any], list[float], Any]:
    """All that there is to compare, by what people call it; seconds of each step; what was compiled."""
    _seed(0)
    program = client.build()
    batches = [program.batch() for _ in range(STEPS)]
    loss_of, compiled = form(program)
    optimizer = torch.optim.SGD(program.module.parameters(), lr=0.01, momentum=0.9)
    found: dict[str, Any] = {}
    seconds = []
    for number, batch in enumerate(batches, 1):
        _seed(number)
        start = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        seconds.append(time.process_time() - start)
        found[f"loss {number}"] = loss.detach().clone()
        for name, parameter in program.module.named_parameters():
            found[f"gradient {number} of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
        found |= {f"{name} after {number}": buffer.clone() for name, buffer in program.module.named_buffers()}
        found[f"random numbers after {number}"] = torch.get_rng_state()
    return found, seconds, compiled


def check(client: Client) -> dict[str, dict[str, Any]]:
    """For each form, whether it is bitwise as eager is, else what differs first, and what it took."""
    for warm in (foregrad.compile(torch.sin, backend="eager"), torch.compile(torch.sin, backend="aot_eager")):
        warm(torch.ones(1))  # what compilers import is not the client's
    wanted, plain, _ = _train(client, _eager)
    result: dict[str, dict[str, Any]] = {}
    for name, form in FORMS.items():
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found, seconds, compiled = _train(client, form)
        except Exception as error:
            result[name] = {"same": False, "differs": f"{type(error).__name__}: {error}"}
            continue
        differs = next((what for what in wanted if not _same(wanted[what], found.get(what))), None)
        row = {"same": differs is None, "differs": differs, "seconds": max(seconds[0] - min(plain), 0.0)}
        if compiled is not None:
            report = foregrad.explain_recompiles(compiled)
            row |= {"graphs": len(report), "eager": report.eager_calls, "why": [str(e.reason) for e in report.eager]}
            row["warned"] = [str(w.message) for w in said if issubclass(w.category, foregrad.errors.ForegradWarning)]
        result[name] = row
    return result


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(torch.nan_to_num(a, 0.123), torch.nan_to_num(b, 0.123))


if __name__ == "__main__":
    print(json.dumps(check(CLIENTS[sys.argv[1]])))
