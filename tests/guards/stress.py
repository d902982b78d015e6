"""Captures beside threads that draw, forks and interrupts, at random moments: `python -m tests.guards.stress`.

    python -m tests.guards.stress                     # the full numbers: some minutes
    python -m tests.guards.stress draws --count 50

tests/guards/test_stress.py runs a few of each.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch
from torch import nn

import foregrad
from foregrad._torch import patches

# What a capture replaces, and nothing else does.
WATCHED = {
    "Module.__call__": lambda: nn.Module.__call__,
    "Module.__getattribute__": lambda: nn.Module.__getattribute__,
    "Tensor.set_": lambda: torch.Tensor.set_,
    "Function.apply": lambda: torch.autograd.Function.__dict__["apply"],
    "checkpoint hook": lambda: torch.utils.checkpoint._checkpoint_hook,
    "FakeTensor": lambda: torch._subclasses.FakeTensor,
    "Generator.manual_seed": lambda: torch.Generator.manual_seed,
    "is_dynamo_compiling": lambda: torch.compiler.is_dynamo_compiling,
    "Tensor.__getattr__": lambda: getattr(torch.Tensor, "__getattr__", None),
    "collector": gc.isenabled,
    "dispatch modes": torch._C._len_torch_dispatch_stack,
    "function modes": torch._C._len_torch_function_stack,
    "grad mode": torch.is_grad_enabled,
    "hooks": lambda: getattr(patches._active, "hooks", None),
    "handler": lambda: signal.getsignal(signal.SIGINT),
}
PATIENCE_S = 60


def state() -> dict[str, object]:
    return {name: look() for name, look in WATCHED.items()}


def leftovers(before: dict[str, object]) -> list[str]:
    now = state()
    return [name for name in WATCHED if now[name] is not before[name] and now[name] != before[name]]


def program(number: int):
    """A function, its arguments, and the result that eager gives."""
    torch_random = torch.Generator().manual_seed(number)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2))

    def function(x):
        y = model(x).sin()
        return (y * torch.nn.functional.dropout(y, 0.0, True)).sum() + number

    return function, torch.randn(3 + number % 3, 4, generator=torch_random, requires_grad=True)


def check(function, compiled, x) -> None:
    (ours,) = torch.autograd.grad(compiled(x), x)
    (theirs,) = torch.autograd.grad(function(x), x)
    assert torch.equal(ours, theirs)


# ------------------------------------------------------------------------------------------------------------ draws


def draws(count: int, capturing: int = 8, drawing: int = 4) -> dict[str, int]:
    """Threads that capture beside others that draw; `count` captures in each."""
    ended, failures, drawn = threading.Event(), [], [[] for _ in range(drawing)]
    before = state()

    def capture(index: int) -> None:
        try:
            for turn in range(count):
                function, x = program(index * count + turn)
                check(function, foregrad.compile(function, backend="eager"), x)
        except BaseException:
            failures.append(traceback.format_exc())

    def draw(into: list) -> None:
        while not ended.is_set():
            into.append(torch.randint(0, 2**62, (4,)))
            random.random()
            time.sleep(0.0005)

    threads = [threading.Thread(target=capture, args=(i,), daemon=True) for i in range(capturing)]
    others = [threading.Thread(target=draw, args=(each,), daemon=True) for each in drawn]
    for thread in (*others, *threads):
        thread.start()
    deadline = time.monotonic() + PATIENCE_S + count * capturing
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = sum(thread.is_alive() for thread in threads)
    ended.set()
    for thread in others:
        thread.join(PATIENCE_S)
    numbers = [number for each in drawn for numbers in each for number in numbers.tolist()]
    for text in failures[:1]:
        print(text, file=sys.stderr)
    return {
        "captures": count * capturing,
        "draws": len(numbers) // 4,
        "failures": len(failures),
        "hangs": hanging,
        "numbers drawn twice": len(numbers) - len(set(numbers)),
        "leftovers": len(leftovers(before)),
    }


# ------------------------------------------------------------------------------------------------------------ forks


def forks(count: int, seed: int = 0) -> dict[str, int]:
    """Children forked at random moments while threads capture; each looks for leftovers, compiles and ends."""
    chance, ended, failures = random.Random(seed), threading.Event(), []
    function, x = program(0)
    check(function, foregrad.compile(function, backend="eager"), x)  # imports: a child waits for others' in vain
    before = state()

    def capture(index: int) -> None:
        turn = 0
        while not ended.is_set():
            function, x = program(index * 10_000 + turn)
            compiled = foregrad.compile(function, backend="eager")
            check(function, compiled, x)
            shared[index] = (function, compiled, x)
            turn += 1

    shared: dict[int, tuple] = {}
    threads = [threading.Thread(target=capture, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    hangs, bad = _forked(count, chance, lambda number: _capture_in_child(before, number, shared))
    ended.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    hangs += sum(thread.is_alive() for thread in threads)
    return {"forks": count, "hangs": hangs, "failures": bad + len(failures), "leftovers": len(leftovers(before))}


class Number:
    value = 0


def function_with_state(number: int):
    """A function whose guards look at the attributes of eight objects, which are often written to."""
    numbers = [Number() for _ in range(8)]

    def function(x):
        for each in numbers:
            x = x + each.value
        return x + number

    return function, numbers


def forked_calls(count: int, seed: int = 0) -> dict[str, int]:
    """Children forked at random moments while threads call compiled functions; each calls these functions, too."""
    ended, x = threading.Event(), torch.ones(3)
    made = [function_with_state(number) for number in range(6)]
    pairs = [(function, foregrad.compile(function, backend="eager")) for function, _ in made]
    for (_, numbers), (_, compiled) in zip(made, pairs, strict=True):
        for turn in range(5):
            for each in numbers:
                setattr(each, f"other_{turn}", turn)
            compiled(x)

    def call(compiled) -> None:
        while not ended.is_set():
            compiled(x)

    def in_child(_: int) -> None:
        for function, compiled in pairs:
            assert torch.equal(compiled(x), function(x))

    threads = [threading.Thread(target=call, args=(compiled,), daemon=True) for _, compiled in pairs]
    for thread in threads:
        thread.start()
    hangs, bad = _forked(count, random.Random(seed), in_child)
    ended.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    return {"forks": count, "hangs": hangs, "failures": bad}


def _forked(count: int, chance: random.Random, in_child: Callable[[int], None]) -> tuple[int, int]:
    """How many of so many children hang, and in how many an error is raised."""
    hangs = bad = 0
    for number in range(count):
        time.sleep(chance.uniform(0.0, 0.02))
        child = os.fork()
        if child == 0:
            _end_with(in_child, number)
        status = _wait_for(child)
        hangs += status is None
        bad += status not in (None, 0)
    return hangs, bad


def _end_with(in_child: Callable[[int], None], number: int) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S / 2)
    try:
        in_child(number)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _capture_in_child(before: dict[str, object], number: int, shared: dict[int, tuple]) -> None:
    found = leftovers(before)
    assert not found, found
    function, x = program(number)
    check(function, foregrad.compile(function, backend="eager"), x)
    for function, compiled, _ in list(shared.values()):  # whose turn another thread may have held
        check(function, compiled, torch.randn(7, 4, requires_grad=True))
    assert not leftovers(before)


def _wait_for(child: int) -> int | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


# ------------------------------------------------------------------------------------------------------- interrupts


def interrupts(count: int, seed: int = 0, backend: str = "eager") -> dict[str, int]:
    """Interrupts at random moments of a first call; afterwards nothing is left, and the function runs compiled."""
    chance = random.Random(seed)
    before = state()
    delivered = left = wrong = 0
    took = 0.02
    for number in range(count):
        function, x = program(number)
        compiled = foregrad.compile(function, backend=backend)
        send = threading.Timer(chance.uniform(0.0, took * 1.2), os.kill, (os.getpid(), signal.SIGINT))
        start = time.monotonic()
        try:
            send.start()
            check(function, compiled, x)
            took = max(took * 0.9, time.monotonic() - start)
            send.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            delivered += 1
        with contextlib.suppress(KeyboardInterrupt):
            send.join()
        found = leftovers(before)
        if found:
            print(f"left by interrupt {number}: {found}", file=sys.stderr)
            left += 1
        try:
            check(function, compiled, x)
            assert len(compiled.foregrad.specializations) == 1, "it does not run compiled"
        except Exception:
            traceback.print_exc()
            wrong += 1
    return {"interrupts": count, "delivered": delivered, "leftovers": left, "failures": wrong}


KINDS = {"draws": (draws, 25), "forks": (forks, 200), "calls": (forked_calls, 200), "interrupts": (interrupts, 200)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="which; all by default")
    parser.add_argument("--count", type=int, help="how many, of each thread for draws")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    for kind in options.kinds or KINDS:
        run, count = KINDS[kind]
        figures = run(options.count or count)
        print(f"{kind}: " + ", ".join(f"{value} {name}" for name, value in figures.items()), flush=True)
        bad += sum(figures[name] for name in figures if name in BAD)
    return 1 if bad else 0


BAD = {"failures", "hangs", "leftovers", "numbers drawn twice"}


if __name__ == "__main__":
    sys.exit(main())
